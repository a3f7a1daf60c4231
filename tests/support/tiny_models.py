"""A tiny Llama and GPT-2 whose weights follow from a formula: the same on every machine."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 64,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "eos_token_id": 1,
}


def write_tiny_llama(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    config = LLAMA | overrides
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 32)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (64, 32)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (32,),
            f"{name}.post_attention_layernorm.weight": (32,),
            f"{name}.self_attn.q_proj.weight": (32, 32),
            f"{name}.self_attn.k_proj.weight": (16, 32),
            f"{name}.self_attn.v_proj.weight": (16, 32),
            f"{name}.self_attn.o_proj.weight": (32, 32),
            f"{name}.mlp.gate_proj.weight": (48, 32),
            f"{name}.mlp.up_proj.weight": (48, 32),
            f"{name}.mlp.down_proj.weight": (32, 48),
        }
    shapes["model.norm.weight"] = (32,)
    return _write(folder, config, shapes, dtype)


def write_tiny_gpt2(folder: Path, **overrides: Any) -> Path:
    config = GPT2 | overrides
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (64, 32),
        "transformer.wpe.weight": (128, 32),
    }
    for layer in range(config["n_layer"]):
        name = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{name}.{norm}.weight": (32,), f"{name}.{norm}.bias": (32,)}
        for linear, num_in, num_out in (
            ("attn.c_attn", 32, 96),
            ("attn.c_proj", 32, 32),
            ("mlp.c_fc", 32, 128),
            ("mlp.c_proj", 128, 32),
        ):
            shapes[f"{name}.{linear}.weight"] = (num_in, num_out)
            shapes[f"{name}.{linear}.bias"] = (num_out,)
    shapes |= {"transformer.ln_f.weight": (32,), "transformer.ln_f.bias": (32,)}
    return _write(folder, config, shapes, torch.float32)


def _write(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, shapes, dtype)
    return folder


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    tensors = {name: _waves(i, shape).to(dtype) for i, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, folder / "model.safetensors")


def _waves(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Sines of incommensurable steps, in float64; matrices scaled to keep magnitudes."""
    steps = torch.arange(math.prod(shape), dtype=torch.float64)
    wave = torch.sin(steps * (1.3 + 0.37 * number) + number)
    scaled = 1 + 0.3 * wave if len(shape) == 1 else wave * 2 / 32**0.5
    return scaled.view(shape).float()
