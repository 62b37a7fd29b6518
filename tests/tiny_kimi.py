"""A tiny Kimi-K2.5 with random weights: a nested config, MLA, routed experts with a selection
bias, YaRN, a vision tower, and the tensor names of the published checkpoint.

save_pretrained of transformers' class would write other names, which vLLM does not load.
"""

import json
import math
from pathlib import Path

import tiny
import torch
from safetensors.torch import save_file
from templates import CHATML

LAYERS = 6

# The shapes that vLLM's MLA on a CPU takes, kv_lora_rank 512 and qk_rope_head_dim 64, are Kimi's.
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "hidden_act": "silu",
    # What transformers has in two norms whatever the config says; published is 1e-5.
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
    },
}
# The published file's names, then transformers' own for the same numbers, which it does not map.
VISION = {
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 1,
    "mm_hidden_size": 32,
    "text_hidden_size": 64,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "video_attn_type": "spatial_temporal",
    "model_type": "kimi_k25_vision",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "pos_emb_time": 4,
}
# vLLM makes the image processor even where no image is served.
PREPROCESSOR = {
    "media_proc_cfg": {
        "in_patch_limit": 64,
        "patch_size": 14,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 8,
        "in_patch_limit_each_frame": 16,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    }
}


def mlp_shapes(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    hidden = TEXT["hidden_size"]
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    t, p = TEXT, f"model.layers.{layer}"
    hidden, heads, rank = t["hidden_size"], t["num_attention_heads"], t["kv_lora_rank"]
    nope, rope, value = t["qk_nope_head_dim"], t["qk_rope_head_dim"], t["v_head_dim"]
    shapes = {
        f"{p}.input_layernorm.weight": (hidden,),
        f"{p}.post_attention_layernorm.weight": (hidden,),
        f"{p}.self_attn.q_a_proj.weight": (t["q_lora_rank"], hidden),
        f"{p}.self_attn.q_a_layernorm.weight": (t["q_lora_rank"],),
        f"{p}.self_attn.q_b_proj.weight": (heads * (nope + rope), t["q_lora_rank"]),
        f"{p}.self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        f"{p}.self_attn.kv_a_layernorm.weight": (rank,),
        f"{p}.self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
        f"{p}.self_attn.o_proj.weight": (hidden, heads * value),
    }
    if layer < t["first_k_dense_replace"]:
        return shapes | mlp_shapes(f"{p}.mlp", t["intermediate_size"])
    shapes |= {
        f"{p}.mlp.gate.weight": (t["n_routed_experts"], hidden),
        f"{p}.mlp.gate.e_score_correction_bias": (t["n_routed_experts"],),
        **mlp_shapes(f"{p}.mlp.shared_experts", t["moe_intermediate_size"]),
    }
    for expert in range(t["n_routed_experts"]):
        shapes |= mlp_shapes(f"{p}.mlp.experts.{expert}", t["moe_intermediate_size"])
    return shapes


def vision_shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, merged = VISION["hidden_size"], VISION["intermediate_size"], 4 * 32
    weights = {
        "vision_tower.patch_embed.proj": (hidden, 3, 14, 14),
        "vision_tower.encoder.blocks.0.norm0": (hidden,),
        "vision_tower.encoder.blocks.0.norm1": (hidden,),
        "vision_tower.encoder.blocks.0.wqkv": (3 * hidden, hidden),
        "vision_tower.encoder.blocks.0.wo": (hidden, hidden),
        "vision_tower.encoder.blocks.0.mlp.fc0": (inner, hidden),
        "vision_tower.encoder.blocks.0.mlp.fc1": (hidden, inner),
        "vision_tower.encoder.final_layernorm": (hidden,),
        "mm_projector.pre_norm": (hidden,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (TEXT["hidden_size"], merged),
    }
    shapes = {"vision_tower.patch_embed.pos_emb.weight": (8, 8, hidden)}
    for name, shape in weights.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def make_weights() -> dict[str, torch.Tensor]:
    """bf16, and fp32 for the bias of the experts' selection, as published.

    Weights vary by 1 / sqrt(width), so that every layer changes the state: a wrong layer, angle
    or expert is far above rounding. The gate's are wider, which keeps the choice of experts away
    from ties.
    """
    hidden, vocab = TEXT["hidden_size"], TEXT["vocab_size"]
    text = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    text |= {"lm_head.weight": (vocab, hidden)}
    for layer in range(LAYERS):
        text |= layer_shapes(layer)
    shapes = {f"language_model.{name}": shape for name, shape in text.items()} | vision_shapes()
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            values *= 0.1
        elif "norm" in name:
            values = 1 + 0.1 * values
        elif "embed_tokens" not in name:
            values *= (2 if ".gate." in name else 1) / math.sqrt(math.prod(shape[1:]))
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        weights[name] = values.to(dtype)
    return weights


def make_tiny_kimi(folder: Path) -> Path:
    folder.mkdir(parents=True)
    media = ("<|media_begin|>", "<|media_end|>", "<|media_pad|>", "<|video|>")
    tokenizer = tiny.make_tokenizer(CHATML, ("<|im_start|>", "<|im_end|>", *media))
    begin, end, pad, video = tokenizer.convert_tokens_to_ids(media)
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        **tokens,
        "media_placeholder_token_id": pad,
        "image_token_id": pad,
        "video_token_id": video,
        "vision_start_token_id": begin,
        "vision_end_token_id": end,
        "projection_hidden_size": VISION["hidden_size"],
        "projection_layer_norm_eps": 1e-5,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|video|>",
        # transformers' default is true.
        "tie_word_embeddings": False,
        "text_config": TEXT | tokens | {"dtype": "bfloat16"},
        "vision_config": VISION,
    }
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    weights = make_weights()
    names = sorted(weights)
    files = {
        f"model-0000{number + 1}-of-000002.safetensors": names[number::2] for number in range(2)
    }
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
