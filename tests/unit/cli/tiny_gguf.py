"""A small GGUF file of the Llama family, written with gguf's own writer."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

HIDDEN, HEADS, KV_HEADS, LAYERS, MLP, VOCAB = 64, 4, 2, 2, 96, 262
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def hugging_face_weights() -> dict[str, npt.NDArray[np.float32]]:
    """Random weights whose values bfloat16 keeps exactly, by their Hugging Face names."""
    generator = np.random.default_rng(0)
    kv_rows = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (kv_rows, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (kv_rows, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (MLP, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, MLP),
        }
    return {
        name: (generator.integers(-128, 128, shape) / 256).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path: Path, pre_tokenizer: str = "smollm") -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    add_tokenizer(writer, pre_tokenizer)
    for name, values in hugging_face_weights().items():
        add_tensor(writer, name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, pre_tokenizer: str) -> None:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(byte) for byte in printable]
    characters += [chr(256 + i) for i in range(256 - len(printable))]  # GPT-2's byte alphabet
    tokens = [*SPECIALS, *characters, "he", "hel", "11"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["h e", "he l", "1 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def add_tensor(writer: gguf.GGUFWriter, name: str, values: npt.NDArray[np.float32]) -> None:
    """Under llama.cpp's name, q and k interleaved as its converter does."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for kind, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        if kind in name:
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, HIDDEN)
            values = halves.swapaxes(1, 2).reshape(values.shape)
    found = names.get_name(name, try_suffixes=(".weight",))
    assert found is not None
    writer.add_tensor(found, np.ascontiguousarray(values))
