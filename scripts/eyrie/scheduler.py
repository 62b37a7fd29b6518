"""vLLM's scheduler without the dummy draft that extraction would verify at each step.

`extract_hidden_states` hands the token just sampled back as a draft, so every decoding step runs
two positions a request to keep one. Where decoding is bound by memory that is free; on a CPU,
bound by arithmetic, it doubles the cost of an answer. Dropping the draft changes no state: they
are stored for whatever positions a step runs.
"""

from vllm.v1.core.sched.scheduler import Scheduler


class NoDraftScheduler(Scheduler):
    def update_draft_token_ids(self, draft_token_ids) -> None:
        pass
