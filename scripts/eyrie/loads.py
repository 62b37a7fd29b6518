"""A draft as vLLM itself reads and loads it, without an engine: in seconds, on a CPU, beside a
verifier of which only config.json is read.

Its own import is light: the processes that load are forked from ones without threads."""

import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eyrie import engine
from eyrie.checkpoint import WEIGHTS, is_nested, read_config, read_header
from eyrie.checks import result

# What every parameter is filled with before the weights are loaded. No bf16 weight of a draft is
# anywhere near it.
SENTINEL = 12345678.0


@dataclass
class Loaded:
    """layer_ids_v1, layer_ids_v2: of vLLM's two model runners, None where one takes the verifier's
    default. unwritten: names of the parameters that the checkpoint has not written whole."""

    layer_ids_v1: tuple[int, ...] | None
    layer_ids_v2: tuple[int, ...] | None
    unwritten: list[str]
    states: bool  # the verifier's class in vLLM hands over the states of its layers


def import_vllm() -> None:
    """What `load` imports, ahead of it."""
    engine.set_environment(0, in_process=True)
    for name in engine.PRELOAD:
        importlib.import_module(name)


def load(folder: Path, verifier: Path, trust_remote_code: bool = False) -> Loaded:
    """Parse a draft's config as vLLM does when it serves, and load its weights into vLLM's class.

    Raises whatever vLLM raises.
    """
    import_vllm()
    import torch
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import get_model_cls, initialize_model
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    config = EngineArgs(
        model=str(verifier),
        trust_remote_code=trust_remote_code,
        skip_tokenizer_init=True,
        generation_config="vllm",
        language_model_only=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        speculative_config={"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3},
    ).create_engine_config()
    draft = config.speculative_config.draft_model_config

    class Runner:
        speculative_config = config.speculative_config

    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            with tempfile.TemporaryDirectory() as meeting:
                init_distributed_environment(1, 0, f"file://{meeting}/point", 0, "gloo")
                initialize_model_parallel(1, 1)
        with torch.device("cpu"), set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config, model_config=draft)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(int(SENTINEL) if parameter.dtype == torch.int64 else SENTINEL)
        loader = get_model_loader(config.load_config)
        model.load_weights(loader.get_all_weights(draft, model))
    unwritten = []
    for name, parameter in model.named_parameters():
        value = torch.tensor(SENTINEL).to(parameter.dtype)
        if bool((parameter == value).any()):
            unwritten.append(name)
    return Loaded(
        GPUModelRunner._get_eagle3_aux_layers_from_config(Runner()),
        get_eagle3_aux_layers_from_config(config.speculative_config),
        unwritten,
        supports_eagle3(get_model_cls(config.model_config)),
    )


def check_loads(folder: Path, config: dict, verifier: Path, trust_remote_code: bool) -> list[dict]:
    """vLLM and transformers read the draft, both of vLLM's model runners take the same layers, and
    every parameter of vLLM's model is written. config: the draft's as a flat one."""
    from transformers import AutoConfig

    checks = []
    if not is_nested(read_config(folder)):
        try:
            kind = type(AutoConfig.from_pretrained(folder)).__name__
        except Exception as error:  # transformers raises its own for what it does not take
            kind = told(error)
        effect = "neither transformers nor vLLM reads the config"
        good = kind == "LlamaConfig"
        checks.append(result("transformers reads the config", good, kind, "LlamaConfig", effect))
    try:
        loaded = load(folder, verifier, trust_remote_code)
    except Exception as error:  # vLLM raises whatever its parts do
        return [*checks, result("vLLM loads it", False, told(error), "loaded", "it does not start")]
    checks.append(result("vLLM loads it", True, "loaded", "loaded", "it does not start"))
    effect = "vLLM takes no draft for this verifier"
    name = "vLLM takes states from the verifier"
    checks.append(result(name, loaded.states, loaded.states, True, effect))
    ids = tuple(config["eagle_aux_hidden_state_layer_ids"])
    for runner, found in (("V1", loaded.layer_ids_v1), ("V2", loaded.layer_ids_v2)):
        name = f"layer ids of vLLM's {runner} runner"
        effect = "states of other layers than trained on: acceptance falls to about 1%"
        checks.append(result(name, found == ids, found, ids, effect))
    # The verifier's are used where the draft has none; only the first layer uses its hidden_norm.
    layers = range(1, config["num_hidden_layers"])
    unused = {f"model.layers.{layer}.hidden_norm.weight" for layer in layers}
    own = "embed_tokens.weight" in read_header(folder / WEIGHTS)
    unused |= set() if own else {"model.embed_tokens.weight"}
    found = sorted(set(loaded.unwritten) - unused)
    effect = "these weights are as memory was: every draft token is garbage"
    name = "every parameter is written"
    checks.append(result(name, not found, ", ".join(found) or "all", "all", effect))
    return checks


def told(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
