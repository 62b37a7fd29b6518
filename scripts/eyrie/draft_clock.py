"""How long a worker of vLLM drafts, and the memory it takes: a `worker_extension_cls`.

vLLM mixes the class into its own worker, in whatever process that runs, and `collective_rpc` calls
its methods by name.
"""

import time

from eyrie.profile import DRAFT_SCOPE


class DraftClock:
    def start_draft_clock(self) -> None:
        """Time the drafter's `propose` from now on; without a drafter, nothing.

        On a GPU events mark begin and end in the stream, so that timing waits for nothing.
        """
        import torch

        self.draft_spans = []
        # The one is vLLM's runner for a CPU, the other its newer one for CUDA.
        runner = self.model_runner
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if drafter is None:
            return
        propose, on_gpu = drafter.propose, torch.cuda.is_available()
        suffix = type(drafter).__name__ == "SuffixDecodingProposer"

        def now():
            if not on_gpu:
                return time.perf_counter()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def timed(*args, **kwargs):
            if suffix:
                # Its own takes no other number than it was loaded with; see eyrie.draft_tokens.
                drafter.num_speculative_tokens = args[0]
            with torch.profiler.record_function(DRAFT_SCOPE):
                begun = now()
                drafted = propose(*args, **kwargs)
                self.draft_spans.append((begun, now()))
            return drafted

        drafter.propose = timed

    def read_draft_clock(self) -> float:
        """Seconds of drafting since the last call."""
        import torch

        spans, self.draft_spans = self.draft_spans, []
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return sum(begun.elapsed_time(ended) for begun, ended in spans) / 1000
        return sum(ended - begun for begun, ended in spans)

    def peak_device_bytes(self) -> int | None:
        """The most memory that torch has held on this worker's GPU; None on a CPU."""
        import torch

        return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
