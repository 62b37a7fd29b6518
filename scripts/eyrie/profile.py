"""Where the time of serving goes, from a trace of torch's profiler as vLLM writes it.

On a GPU the time is that of kernels; on a CPU, the self time of operators. What runs inside the
drafter's `propose` is the draft's, whatever it is; the rest is told by its name.
"""

import gzip
import json
import re
from pathlib import Path

# The scope that eyrie.draft_clock opens round the drafter.
DRAFT_SCOPE = "eyrie: draft"
# The first that matches counts. Names are those of NCCL, vLLM's own kernels, FlashAttention,
# FlashInfer, Triton, CUTLASS, cuBLAS (nvjet is its name on Hopper), and of torch's operators.
KINDS = {
    # FlashInfer's fused norm and all-reduce counts here: the wait for the others dominates it.
    "all-reduce": re.compile(r"all_?reduce|cross_device_reduce|multimem", re.IGNORECASE),
    "MoE": re.compile(
        r"moe|expert|topk_?(gating|softmax|sigmoid)|grouped_?(topk|gemm)|GroupProblemShape",
        re.IGNORECASE,
    ),
    "attention": re.compile(
        r"attention|attn|flash_?(fwd|mla|decode)|fmha|paged_?kv|reshape_and_cache"
        r"|concat_and_cache|mla_(decode|prefill)|flash_splitkv",
        re.IGNORECASE,
    ),
    "matrix products": re.compile(
        r"gemm|gemv|cublas|cutlass|nvjet|matmul|marlin|wvSplitK|onednn|mkldnn"
        r"|aten::(mm|addmm|bmm|baddbmm|linear)$",
        re.IGNORECASE,
    ),
}


def kind_of(name: str) -> str:
    """What a kernel or operator is for: a key of KINDS, or other."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")


def self_times(events: list[dict]) -> list[tuple[dict, float]]:
    """Operators of one thread, each with the microseconds spent in it and in none inside it."""
    spent, open_ones = [], []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ones and event["ts"] >= open_ones[-1][0]["ts"] + open_ones[-1][0]["dur"]:
            open_ones.pop()
        if open_ones:
            open_ones[-1][1] -= event["dur"]
        open_ones.append([event, event["dur"]])
        spent.append(open_ones[-1])
    return [(event, max(own, 0.0)) for event, own in spent]


def shares(trace: Path) -> dict:
    """{kind: share of the time} of a trace in Chrome's format, packed or not; the time itself in
    `seconds`, and in `of` whether it is that of kernels or operators.

    Raises:
        ValueError: the trace has neither kernels nor operators.
    """
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if kernels:
        scopes = [e for e in events if e.get("cat") == "gpu_user_annotation"]
        timed, of = [(e, e["dur"]) for e in kernels], "kernels"
    else:
        scopes = [e for e in events if e.get("cat") == "user_annotation"]
        threads: dict = {}
        for event in events:
            if event.get("cat") == "cpu_op":
                threads.setdefault(event["tid"], []).append(event)
        timed, of = (
            [pair for thread in threads.values() for pair in self_times(thread)],
            "operators",
        )
    if not timed:
        raise ValueError(f"{trace}: holds neither kernels nor operators")
    drafts = [(e["ts"], e["ts"] + e["dur"]) for e in scopes if e["name"] == DRAFT_SCOPE]
    total: dict[str, float] = dict.fromkeys([*KINDS, "draft", "other"], 0.0)
    for event, spent in timed:
        drafted = any(begun <= event["ts"] < ended for begun, ended in drafts)
        total["draft" if drafted else kind_of(event["name"])] += spent
    everything = sum(total.values())
    found = {kind: round(spent / everything, 4) for kind, spent in total.items()}
    return found | {"seconds": round(everything / 1e6, 4), "of": of}
