"""Fields of config.json of small models, as transformers has them."""

from typing import Any

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

GPT2: dict[str, Any] = {
    "vocab_size": 90,
    "n_positions": 96,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
