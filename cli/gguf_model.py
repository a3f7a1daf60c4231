"""GGUF (Llama family) to a Hugging Face folder: config.json, bfloat16 safetensors, tokenizer.

Needs numpy, gguf and tokenizers, not torch or transformers. llama.cpp stores the
rows of q and k of each head interleaved for its rotary embedding, (half, 2) → (2, half); that is
undone here.
"""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from paceline.cli.gguf_tokenizer import write_tokenizer
from paceline.cli.progress import Advance

BFLOAT16_BYTES = 2
Floats = npt.NDArray[np.float32]

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(gguf: Path, folder: Path, advance: Advance) -> None:
    """Writes a model folder. `advance` is called with the fraction done."""
    reader = GGUFReader(gguf)
    folder.mkdir()
    fields = {name: field.contents() for name, field in reader.fields.items()}
    advance(0.1)
    config = llama_config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
    write_json(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(fields, folder)
    advance(0.2)
    write_weights(reader, config, folder / "model.safetensors", advance)


def llama_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
    }


def shortest(value: float) -> float:
    """GGUF keeps float32: 9.999999747e-06 was 1e-5."""
    return float(str(np.float32(value)))


def write_weights(reader: GGUFReader, config: dict[str, Any], path: Path, advance: Advance) -> None:
    """One safetensors file: u64 length of the header, JSON header, tensors in the same order."""
    header = json.dumps(safetensors_header(reader)).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for done, values in enumerate(llama_tensors(reader, config), start=1):
            file.write(to_bfloat16(values).tobytes())
            advance(0.2 + 0.8 * done / len(reader.tensors))
        file.flush()
        os.fsync(file.fileno())


def safetensors_header(reader: GGUFReader) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        start, end = end, end + BFLOAT16_BYTES * int(tensor.n_elements)
        header[hugging_face_name(tensor.name)] = {
            "dtype": "BF16",
            "shape": shape(tensor),
            "data_offsets": [start, end],
        }
    return header


def llama_tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[Floats]:
    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        values = floats(tensor)
        kind = tensor.name.split(".", 2)[-1]
        if kind in heads:
            values = undo_rope_interleave(values, heads[kind])
        yield values


def floats(tensor: ReaderTensor) -> Floats:
    values: Floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    return values.reshape(shape(tensor))


def shape(tensor: ReaderTensor) -> list[int]:
    """[out, in] or [size]; GGUF lists dimensions from the fastest."""
    return [int(size) for size in reversed(tensor.shape)]


def hugging_face_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, layer, kind = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}"


def undo_rope_interleave(weight: Floats, num_heads: int) -> Floats:
    """Rows of each head from (half, 2) back to (2, half)."""
    rows, columns = weight.shape
    interleaved = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return interleaved.swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """The upper 16 bits, rounded to nearest, ties to even. Weights are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
