"""One method of serving in an engine of its own, and what is measured of each request."""

import collections
import time
from pathlib import Path

from eyrie import engine
from eyrie.profile import shares
from eyrie.provenance import peak_rss_bytes

# Requests served before the clock starts, of so many tokens: they fill caches and pick kernels.
WARM_UP = 2
WARM_UP_TOKENS = 8
# Of the run that is profiled: a trace of a step on a GPU takes some megabytes.
PROFILED_TOKENS = 16

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def speculation(method: dict, draft_tokens: int, draft_gpus: int | None) -> dict:
    """vLLM's arguments that make it serve by `method`: {name, kind, model}."""
    if method["kind"] == "baseline":
        return {}
    settings = {"method": method["kind"], "num_speculative_tokens": draft_tokens}
    if method["kind"] == "ngram":
        settings |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if method["kind"] == "suffix":
        # It would draft a prompt's answer from the time that it was asked before.
        settings["suffix_decoding_max_cached_requests"] = 0
    if method["kind"] == "eagle3":
        settings["model"] = method["model"]
        if draft_gpus:
            settings["draft_tensor_parallel_size"] = draft_gpus
    return {"speculative_config": settings, "per_request_spec_decode_metrics": "detailed"}


def read_counters(llm) -> dict[str, int]:
    """vLLM's counters since its start."""
    counters = dict.fromkeys(COUNTERS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            counters[COUNTERS[metric.name]] += int(metric.value)
    return counters


def record(output, seconds: float, draft_tokens: int) -> dict:
    """What one request gave and took; `steps` has [proposed, accepted] of each draft in turn."""
    (answer,), stats, spec = output.outputs, output.metrics, output.outputs[0].spec_decode_metrics
    steps = list(zip(spec.per_step_drafted, spec.per_step_accepted, strict=True)) if spec else []
    new = len(answer.token_ids)
    later = stats.last_token_ts - stats.first_token_ts
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "new_tokens": new,
        "finish": answer.finish_reason,
        "seconds": round(seconds, 4),
        "first_token_seconds": round(stats.first_token_latency, 4),
        "token_seconds": round(later / (new - 1), 5) if new > 1 else None,
        "drafts": len(steps),
        "proposed": sum(proposed for proposed, _ in steps),
        "accepted": sum(accepted for _, accepted in steps),
        **{f"proposed_{k}": sum(p >= k for p, _ in steps) for k in range(1, draft_tokens + 1)},
        **{f"accepted_{k}": sum(a >= k for _, a in steps) for k in range(1, draft_tokens + 1)},
        "tokens": list(answer.token_ids),
        "steps": steps,
    }


class Serving:
    """A loaded engine. Its public methods take and return what a pipe can carry."""

    def __init__(self, method: dict, draft_tokens: int, warm_up: list[list[int]], args):
        started = time.time()
        from vllm.config import ProfilerConfig

        args.dtype = engine.resolve_dtype(args.dtype)
        # A folder for each method, as each has one trace to tell from.
        self.traces = Path(args.traces).resolve() / method["name"] if args.traces else None
        more = speculation(method, draft_tokens, args.draft_gpus)
        if not args.gpus:
            from eyrie.draft_tokens import DraftTokensScheduler

            more["scheduler_cls"] = DraftTokensScheduler
        if self.traces:
            more["profiler_config"] = ProfilerConfig(
                profiler="torch",
                torch_profiler_dir=str(self.traces),
                torch_profiler_with_stack=False,
            )
        self.llm = engine.load(
            args,
            **more,
            disable_log_stats=False,
            # Each repetition of a prompt costs its prefill anew, to every method.
            enable_prefix_caching=False,
            worker_extension_cls="eyrie.draft_clock.DraftClock",
        )
        # Where a request ends beyond it, vLLM verifies drafts that nobody made.
        self.reach = float("inf")
        if method["kind"] == "eagle3":
            config = self.llm.llm_engine.vllm_config.speculative_config
            self.reach = config.draft_model_config.max_model_len - draft_tokens
        self.llm.collective_rpc("start_draft_clock")
        self.dtype, self.asked = args.dtype, 0
        self.load_seconds = round(time.time() - started, 2)
        self.serve(warm_up[:WARM_UP], WARM_UP, draft_tokens, WARM_UP_TOKENS)

    def run(self, prompts: list[list[int]], samplings: list, concurrency: int) -> list[tuple]:
        """(output, seconds from asking to its end) of each prompt; `concurrency` of them are under
        way as long as there are so many."""
        llm, waiting = self.llm.llm_engine, collections.deque(range(len(prompts)))
        running, done = {}, {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                number = waiting.popleft()
                self.asked += 1
                prompt = {"prompt_token_ids": prompts[number]}
                running[str(self.asked)] = number, time.perf_counter()
                llm.add_request(str(self.asked), prompt, samplings[number])
            for output in llm.step():
                if output.finished:
                    number, begun = running.pop(output.request_id)
                    done[number] = output, time.perf_counter() - begun
        return [done[number] for number in range(len(prompts))]

    def sampling(self, draft_tokens: int, max_tokens: int, **more):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            **{"temperature": 0.0} | more,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"draft_tokens": draft_tokens},
        )

    def serve(
        self, prompts: list[list[int]], concurrency: int, draft_tokens: int, max_tokens: int
    ) -> list[dict]:
        """Serve prompts of tokens at temperature 0. Returns a record of each; what is measured of
        all together, in each as `group_...`: the seconds, those of drafting, and by how much the
        engine's counters rose."""
        samplings = [self.sampling(draft_tokens, max_tokens)] * len(prompts)
        before = read_counters(self.llm)
        self.llm.collective_rpc("read_draft_clock")
        begun = time.perf_counter()
        done = self.run(prompts, samplings, concurrency)
        seconds = time.perf_counter() - begun
        drafting = max(self.llm.collective_rpc("read_draft_clock"))
        after = read_counters(self.llm)
        group = {"seconds": round(seconds, 4), "draft_seconds": round(drafting, 4)}
        group |= {name: after[name] - before[name] for name in after}
        group = {f"group_{name}": value for name, value in group.items()}
        return [
            record(output, took, draft_tokens)
            | {"beyond": len(ids) + max_tokens > self.reach}
            | group
            for ids, (output, took) in zip(prompts, done, strict=True)
        ]

    def top_two(self, prompts: list[list[int]]) -> list[dict]:
        """The two likeliest next tokens of each prompt, and how far their logits are apart."""
        samplings = [self.sampling(0, 1, logprobs=2)] * len(prompts)
        found = []
        for output, _ in self.run(prompts, samplings, 1):
            (likeliest,) = output.outputs[0].logprobs
            # vLLM adds the sampled token where it is not among them.
            pairs = sorted(((p.logprob, token) for token, p in likeliest.items()), reverse=True)[:2]
            gap = pairs[0][0] - pairs[1][0]
            found.append({"tokens": [token for _, token in pairs], "gap": round(gap, 6)})
        return found

    def sample(
        self, prompts: list[list[int]], count: int, seed: int, concurrency: int, draft_tokens: int
    ) -> list[list[int]]:
        """For each prompt the second token of `count` samples at temperature 1: the first follows
        from the prompt, and what follows that was drafted and verified."""
        asked = [ids for ids in prompts for _ in range(count)]
        samplings = [
            self.sampling(draft_tokens, 2, temperature=1.0, seed=seed + number, ignore_eos=True)
            for number in range(len(asked))
        ]
        second = [
            output.outputs[0].token_ids[1] for output, _ in self.run(asked, samplings, concurrency)
        ]
        return [second[i : i + count] for i in range(0, len(second), count)]

    def profiled(self, prompts: list[list[int]], concurrency: int, draft_tokens: int) -> dict:
        """Where the time of a short run goes, by torch's profiler."""
        self.llm.start_profile()
        sampling = self.sampling(draft_tokens, PROFILED_TOKENS)
        self.run(prompts, [sampling] * len(prompts), concurrency)
        self.llm.stop_profile()
        # One rank tells for all: they wait for each other.
        traces = sorted(self.traces.rglob("*.pt.trace.json.gz"))
        return shares(traces[0])

    def about(self) -> dict:
        import torch

        return {
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "load_seconds": self.load_seconds,
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": self.llm.collective_rpc("peak_device_bytes")[0],
        }


def work(pipe, *settings) -> None:
    """Load an engine and do what the pipe asks for, (method, arguments), until it closes."""
    engine.end_with_parent()
    serving = Serving(*settings)
    pipe.send(serving.about())
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(serving, name)(*arguments))
