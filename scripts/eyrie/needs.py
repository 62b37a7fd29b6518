"""Memory and disk that a job asks its scheduler for, in MB: upper bounds, as far as the config and
the verifier's sizes tell them."""

from eyrie.config import Config, SourceBlock
from eyrie.plan import VerifierSizes, host_bytes, states_at_most, training_bytes

# A stage that holds no weights, and one whose verifier's sizes are not known yet.
SMALL_MB, UNKNOWN_MB = 4_000, 32_000


def megabytes(size: float) -> int:
    return round(size / 10**6)


class Needs:
    """sizes: the verifier's, None while they are not known. copies: jobs get copies of their inputs
    of their own, as where results are in a bucket."""

    def __init__(self, config: Config, sizes: VerifierSizes | None, copies: bool):
        self.config, self.sizes, self.copies = config, sizes, copies

    def memory(self, stage: str):
        """Host memory of extract, train, check or bench, as a resource: for the run that a job is
        of, or the first."""

        def resource(wildcards):
            runs = self.config.runs
            run = runs[wildcards.run] if "run" in wildcards.keys() else next(iter(runs.values()))
            if not self.sizes:
                return UNKNOWN_MB
            return megabytes(host_bytes(self.config, run, self.sizes)[stage])

        return resource

    def verifier(self) -> int:
        """Disk of the verifier where it is fetched; a local one is linked to."""
        known = self.sizes and not self.config.verifier.source.startswith("path:")
        return megabytes(self.sizes.weight_bytes) if known else 0

    def conversations(self, source: SourceBlock) -> int:
        """Disk of conversations that are fetched, a guess: how many there are is not known yet. A
        local file is linked to."""
        return 0 if source.source.startswith("path:") else 1_000

    def states(self, data: str) -> int:
        """Disk of a data set's states, every row as long as it may be."""
        # Until the verifier is known, the draft's heads tell its size closely enough.
        guess = self.config.draft.num_attention_heads * self.config.draft.head_dim
        hidden = self.sizes.hidden_size if self.sizes else guess
        return megabytes(states_at_most(self.config, data, hidden))

    def extraction(self, data: str, shards: int) -> int:
        """Disk of the job that writes so many of a data set's shards."""
        return self.copied() + self.states(data) * shards // self.config.shards_of(data)

    def training(self, run: str) -> int:
        """Disk of a run's checkpoints and training states, and of the job's copies."""
        block, layers = self.config.runs[run], len(self.config.extract.layer_ids)
        own = UNKNOWN_MB
        if self.sizes:
            own = megabytes(training_bytes(block, self.sizes.text, layers)["disk"])
        return own + self.copied() + (self.states(block.data) if self.copies else 0)

    def copied(self) -> int:
        """Disk of a job's own copy of the verifier."""
        if not self.copies:
            return 0
        return megabytes(self.sizes.weight_bytes) if self.sizes else UNKNOWN_MB
