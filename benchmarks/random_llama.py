"""A folder with a Llama of random weights: for benchmarks in which only the work counts.

Numbers are drawn on the device and written layer by layer, in parallel: 16 GB in about as many
seconds. Every token of the vocabulary is a visible word; prompts are token ids.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.word_tokenizer import word_tokenizer
from paceline.models.manifest import weights_digest
from paceline.models.weight_files import INDEX_NAME

NUM_WRITERS = 8
_OTHERS = "others.safetensors"
Shapes = dict[str, tuple[int, ...]]


def write_random_llama(
    folder: Path, fields: Mapping[str, Any], device: str, dtype: torch.dtype
) -> Path:
    """`fields` of config.json, whose architecture is added. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **fields}
    (folder / "config.json").write_text(json.dumps(config))
    word_tokenizer(fields["vocab_size"]).save(str(folder / "tokenizer.json"))
    shards = {_OTHERS: other_shapes(fields)}
    for layer in range(fields["num_hidden_layers"]):
        shards[f"layer-{layer:03}.safetensors"] = layer_shapes(fields, layer)
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        list(writers.map(partial(_write, folder, device, dtype), shards, shards.values()))
    homes = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": homes}))
    weights_digest(folder)  # workers find it beside the weights
    return folder


def _write(folder: Path, device: str, dtype: torch.dtype, file: str, shapes: Shapes) -> None:
    tensors = {name: _draw(shape, device, dtype).cpu() for name, shape in shapes.items()}
    save_file(tensors, folder / file)


def _draw(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, ones for norms."""
    place = torch.empty(shape, device=device, dtype=dtype)
    return place.fill_(1) if place.dim() == 1 else place.normal_(std=0.02)


def other_shapes(fields: Mapping[str, Any]) -> Shapes:
    """Of the weights that belong to no layer."""
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not fields.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def layer_shapes(fields: Mapping[str, Any], layer: int) -> Shapes:
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    kv = hidden * fields["num_key_value_heads"] // fields["num_attention_heads"]
    parts: Shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
