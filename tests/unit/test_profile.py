"""What kernels and operators are told to be for, and a real profile of a CPU."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from eyrie.draft_clock import DraftClock
from eyrie.profile import kind_of, self_times, shares


@pytest.mark.parametrize(
    "name, kind",
    [
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "all-reduce",
        ),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)", "all-reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot", "all-reduce"),
        ("multimem_all_reduce_kernel<c10::BFloat16, 16>", "all-reduce"),
        ("c10d::allreduce_", "all-reduce"),
        ("fused_moe_kernel", "MoE"),
        ("void vllm::moe::topkGatingSoftmax<8, 384, 4, 16>", "MoE"),
        ("void marlin_moe_wna16::Marlin<...>", "MoE"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "MoE"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("void flash_fwd_splitkv_mla_kernel<...>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("fmhaSm100Kernel_QkvBfloat16OBfloat16H192", "attention"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void marlin::Marlin<...>", "matrix products"),
        ("aten::addmm", "matrix products"),
        # No attention, though its library's name begins like it.
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "other"),
        ("triton_poi_fused_mul_silu_0", "other"),
        ("aten::_log_softmax", "other"),
    ],
)
def test_kernels_are_told_by_their_names(name, kind):
    assert kind_of(name) == kind


def test_a_real_profile_of_a_cpu(tmp_path):
    """Products and attention of a model and, inside the drafter that the clock wraps, the draft's
    own products, which are the draft's alone."""
    x = torch.randn(256, 256)
    heads = torch.randn(1, 4, 256, 64)
    drafter = SimpleNamespace(propose=lambda: x @ x)
    worker = DraftClock()
    worker.model_runner = SimpleNamespace(drafter=drafter)
    worker.start_draft_clock()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(20):
            torch.softmax(x @ x, -1)
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            drafter.propose()
    plain = tmp_path / "trace.json"
    profile.export_chrome_trace(str(plain))
    packed = tmp_path / "trace.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    found = shares(packed)
    assert found["of"] == "operators" and found == shares(plain)
    kinds = {kind: share for kind, share in found.items() if kind not in ("of", "seconds")}
    assert sum(kinds.values()) == pytest.approx(1, abs=1e-3)
    assert all(kinds[kind] > 0.02 for kind in ("draft", "attention", "matrix products"))
    assert kinds["all-reduce"] == kinds["MoE"] == 0
    # The clock saw the same.
    assert 0 < worker.read_draft_clock() < 60
    assert worker.read_draft_clock() == 0 and worker.peak_device_bytes() is None


def test_kernels_count_where_there_are_some(tmp_path):
    """A trace in the form of a GPU's: the host's operators only launch kernels."""

    def event(cat: str, name: str, ts: float, dur: float) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7}

    events = [
        event("cpu_op", "aten::mm", 0, 1000),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, 50),
        event("kernel", "nvjet_tst_128x64", 50, 30),
        event("gpu_user_annotation", "eyrie: draft", 80, 20),
        event("kernel", "nvjet_tst_64x8", 81, 20),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = shares(path)
    assert (found["all-reduce"], found["matrix products"], found["draft"]) == (0.5, 0.3, 0.2)
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match="neither kernels nor operators"):
        shares(path)


def test_self_times_leave_out_what_is_inside():
    events = [{"ts": t, "dur": d} for t, d in ((0, 10), (1, 4), (2, 2), (6, 3), (20, 5))]
    assert [own for _, own in self_times(events)] == [3, 2, 2, 3, 5]
