import pytest

from eyrie.memory import GIB, extraction_memory, require_memory

# Kimi-K2.5: 61 layers, MLA with a latent of 512 and 64 rotary channels.
KIMI = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
}
SMOL = {
    "num_key_value_heads": 3,
    "num_attention_heads": 9,
    "hidden_size": 576,
    "num_hidden_layers": 30,
}


def test_kimi_on_eight_gpus():
    memory = extraction_memory(KIMI, 547 * 10**9, 2, 4, 8, 8192)
    # One latent a layer, on each GPU whole, and four states of 7,168 numbers.
    assert memory.kv == 576 * 61 * 2 and memory.states == 57_344
    assert memory.weights == 547 * 10**9 / 8
    fit = require_memory(memory, 0.9 * 141e9, None, 2048)
    assert 200 < fit < 260
    with pytest.raises(ValueError, match=r"63.7 of weights .* leave -4.\d+ GiB; take more GPUs"):
        require_memory(memory, 0.9 * 72e9, None, 2048)


def test_heads_are_divided_among_gpus_and_never_below_one():
    one = extraction_memory(SMOL, 0, 2, 4, 1, 2048)
    assert one.kv == 2 * 3 * 64 * 30 * 2
    assert extraction_memory(SMOL, 0, 2, 4, 8, 2048).kv == 2 * 1 * 64 * 30 * 2
    assert extraction_memory(SMOL, 0, 4, 4, 0, 2048).kv == 2 * one.kv


def test_a_cache_that_holds_no_row_is_refused():
    memory = extraction_memory(SMOL, 0, 4, 4, 0, 2048)
    assert require_memory(memory, 0, 3 * GIB, 256) == 227
    with pytest.raises(ValueError, match=r"the cache has 0\.01 GiB"):
        require_memory(memory, 0, 0.01 * GIB, 256)
