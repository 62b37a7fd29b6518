"""The engine's settings, the same for extraction and benchmark, on a GPU and on a CPU."""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

# 256 MiB of states may wait for the disk before the engine does.
QUEUE_BYTES = 1 << 28
# What an engine imports as it loads, for processes that are forked from one that has it. None of
# them touches a GPU.
PRELOAD = ["vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_model_runner"]


def set_environment(gpus: int, in_process: bool, compiled: bool = False) -> None:
    """Set what vLLM reads from the environment; call it before vllm is imported.

    in_process: the engine runs in this process, which starts sooner, ends with it, and outlives
    an out-of-memory error. On a CPU it always does. compiled: whether an engine on a CPU is to be.
    """
    # vLLM warns of what every engine here chooses on purpose; its errors are told.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The connector is imported by name, in the engine's worker processes too.
    scripts = str(Path(__file__).resolve().parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if scripts not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([scripts, *filter(None, paths)])
    if in_process or not gpus:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if gpus:
        return
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # It would go over the engine's own argument, and counts whole GiB.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if not compiled:
        # What little vLLM compiles all the same, the ranks of log-probabilities, takes each engine
        # four seconds for nothing.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # vLLM's MLA on a CPU takes blocks of 16 and a draft's attention blocks of 32, so neither would
    # serve with the other. Without MLA the same weights run as plain attention.
    os.environ.setdefault("VLLM_MLA_DISABLE", "1")


def prepare(gpus: int, in_process: bool, compiled: bool = False) -> None:
    """As `set_environment`, for a process that is to run an engine. On a CPU it is started again
    with Intel's OpenMP preloaded, as vLLM asks for: speculative decoding is slow with the
    compiler's own."""
    set_environment(gpus, in_process, compiled)
    if gpus:
        return
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    # LD_PRELOAD is split at blanks and colons, so it cannot name a path that holds one.
    nameable = openmp.exists() and not set(" :") & set(str(openmp))
    if nameable and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = f"{openmp} {os.environ.get('LD_PRELOAD', '')}".strip()
        os.execv(sys.executable, [sys.executable, *sys.argv])


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, whatever ended that."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def resolve_dtype(name: str) -> str:
    """`auto` is bfloat16 where the device multiplies it in hardware, else float32: a CPU without
    AVX512-BF16 is a hundred times slower in bf16."""
    if name != "auto":
        return name
    import torch

    fast = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if fast else "float32"


def engine_arguments(args) -> dict:
    """vLLM's arguments that extraction and every benchmark method share."""
    arguments = {
        "model": str(args.verifier),
        "dtype": args.dtype,
        "trust_remote_code": args.trust_remote_code,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "seed": 0,
        # The engine is given tokens and asked for tokens.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # Data and prompts are text: a vision tower would take memory for nothing.
        "language_model_only": True,
    }
    if args.gpus:
        arguments["tensor_parallel_size"] = args.gpus
        arguments["gpu_memory_utilization"] = args.gpu_memory_percent / 100
    else:
        arguments["enforce_eager"] = not args.compile
        arguments["kv_cache_memory_bytes"] = round(args.kv_cache_gib * 2**30)
    return arguments


def load(args, **more):
    """vLLM's LLM, of `engine_arguments` and `more`."""
    from llvmlite.binding import ffi
    from vllm import LLM

    # In this process vLLM looks for kernels in every loaded module by vars(), which the library
    # object of llvmlite, which numba loads, answers with a function unless it has one.
    ffi.lib._fntab.setdefault("__dict__", {})
    # vLLM collects garbage ten times as it loads, half a second each among what imports have made.
    gc.freeze()
    return LLM(**engine_arguments(args), **more)


def extraction_arguments(layer_ids: list[int], gpus: int, states: str) -> dict:
    """vLLM's arguments that make it keep the states of `layer_ids` and hand them over.

    states: bf16 or fp8, in which they are stored.

    Ids follow vLLM: id k is the residual stream entering layer k, id L (the number of layers)
    the last one before the final norm. They must ascend: vLLM sorts and merges them.
    """
    arguments = {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "EyrieConnector",
            "kv_connector_module_path": "eyrie.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"queue_bytes": QUEUE_BYTES, "states": states},
        },
        # A step that fails for want of memory is then the only one under way.
        "async_scheduling": False,
    }
    if not gpus:
        from eyrie.scheduler import NoDraftScheduler

        arguments["scheduler_cls"] = NoDraftScheduler
    return arguments


def require_states(args) -> None:
    """Ask vLLM's model class whether it hands over the states of layers, before the load.

    Raises:
        ValueError: naming the model, if it does not.
    """
    from vllm import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    config = EngineArgs(**engine_arguments(args)).create_model_config()
    if not supports_eagle3(get_model_cls(config)):
        raise ValueError(
            f"verifier of type {config.hf_config.model_type}: vLLM's {config.architecture} does "
            "not hand over the states of its layers (it lacks SupportsEagle3), so it can neither "
            "be extracted from nor serve with a draft. Take a verifier of another family, Llama or "
            "Qwen3 say, or a later vLLM"
        )


def add_arguments(parser) -> None:
    """The options from which `engine_arguments` is made."""
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"]
    )
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--gpus", type=int, default=0, help="tensor parallel size; 0 is a CPU")
    parser.add_argument("--compile", action="store_true", help="on a CPU; a GPU always does")
    parser.add_argument("--gpu-memory-percent", type=int, default=90, help="of each GPU's")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="on a CPU")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
