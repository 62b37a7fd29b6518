"""vLLM's scheduler with a number of draft tokens that each request names.

One loaded engine then serves every `num_speculative_tokens` up to the one it was loaded with. It is
for engines that capture no graphs (enforce_eager): there a step with k draft tokens computes the
same whatever the most is.
"""

from vllm.v1.core.sched.scheduler import Scheduler


class DraftTokensScheduler(Scheduler):
    """Requests say `extra_args={"draft_tokens": k}`; of those in one step the most counts."""

    def schedule(self, *args, **kwargs):
        output = super().schedule(*args, **kwargs)
        wanted = [
            self.requests[name].sampling_params.extra_args["draft_tokens"]
            for name in output.num_scheduled_tokens
        ]
        if self.num_spec_tokens and wanted:
            output.num_spec_tokens_to_schedule = max(wanted)
        return output
