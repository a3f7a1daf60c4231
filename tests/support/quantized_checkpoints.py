"""Small random checkpoints in the forms of GPTQ and AWQ, and the floats that they stand for.

Packing follows the formats' definitions number by number; nothing here is shared with the product.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB = 64, 128, 48
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attention_bias": True,
}
LAYERS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.v_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
Tensors = dict[str, torch.Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True, slots=True)
class Form:
    """How to store; `sorted_inputs` is what desc_act leads to: groups in any order."""

    method: str
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    sorted_inputs: bool = False
    config: dict[str, Any] = field(default_factory=dict)  # further fields


def write_checkpoint(folder: Path, form: Form) -> dict[str, torch.Tensor]:
    """Writes the quantised model; returns the weights [out, in] that it stands for."""
    tensors, stored, floats = _model(form)
    quantization = {
        "quant_method": form.method,
        "bits": form.bits,
        "group_size": form.group_size,
        **form.config,
    }
    _write(folder, CONFIG | {"quantization_config": quantization}, tensors | stored)
    return floats


def write_floats(folder: Path, form: Form, tied: bool = False) -> None:
    """The same model with float weights."""
    tensors, _, floats = _model(form)
    if tied:
        del tensors["lm_head.weight"]
    weights = {f"{name}.weight": weight for name, weight in floats.items()}
    _write(folder, CONFIG | {"tie_word_embeddings": tied}, tensors | weights)


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def _model(form: Form) -> tuple[Tensors, Tensors, Tensors]:
    """Tensors that stay floats, those of the form, and the weights that these stand for."""
    chance = torch.Generator().manual_seed(form.bits + form.group_size)
    tensors: Tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=chance) / 8,
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=chance) / 8,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    stored: Tensors = {}
    floats: Tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
        orders = {num_in: torch.randperm(num_in, generator=chance) for num_in in (HIDDEN, INNER)}
        for part, (num_in, num_out) in LAYERS.items():
            name = f"model.layers.{layer}.{part}"
            if "self_attn" in part:
                tensors[f"{name}.bias"] = torch.randn(num_out, generator=chance) / 8
            packed, floats[name] = _layer(form, num_in, num_out, orders[num_in], chance)
            stored |= {f"{name}.{kind}": tensor for kind, tensor in packed.items()}
    return tensors, stored, floats


def _layer(
    form: Form, num_in: int, num_out: int, order: torch.Tensor, chance: torch.Generator
) -> tuple[Tensors, torch.Tensor]:
    group_size = num_in if form.group_size == -1 else form.group_size
    num_groups, most = num_in // group_size, (1 << form.bits) - 1
    numbers = torch.randint(0, most + 1, (num_in, num_out), generator=chance)
    zeros = torch.randint(0, most + 1, (num_groups, num_out), generator=chance)
    if form.symmetric:
        zeros.fill_((most + 1) // 2)
    scales = (torch.rand(num_groups, num_out, generator=chance) / most / 4).half()
    groups = torch.arange(num_in) // group_size
    if form.sorted_inputs:
        groups = groups[order]
    packed: Tensors = {"scales": scales}
    if form.method == "awq":
        packed["qweight"] = _pack_along_out(numbers, 4, AWQ_ORDER)
        packed["qzeros"] = _pack_along_out(zeros, 4, AWQ_ORDER)
    else:
        is_v2 = form.config.get("checkpoint_format") == "gptq_v2"
        stored = zeros if is_v2 else (zeros - 1) & most
        plain = list(range(32 // form.bits))
        packed["qweight"] = _pack_along_out(numbers.t(), form.bits, plain).t().contiguous()
        packed["qzeros"] = _pack_along_out(stored, form.bits, plain)
        packed["g_idx"] = groups.int()
    weight = torch.empty(num_out, num_in)
    for k in range(num_in):
        g = int(groups[k])
        weight[:, k] = scales[g].float() * (numbers[k] - zeros[g]).float()
    return packed, weight


def _pack_along_out(numbers: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """[rows, columns] → int32 [rows, columns · bits / 32]"""
    per_word = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for word in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, word] |= numbers[:, word * per_word + place] << (bits * i)
    return words.to(torch.int32)
