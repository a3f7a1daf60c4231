"""Writes a folder that `load_model` and a gateway take for a model: no weights, byte tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
EOS_TOKEN_ID = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_mock_model(folder: Path, **overrides: Any) -> Path:
    """`overrides` replace fields of config.json; vocab_size at least 260. Returns `folder`."""
    config: dict[str, Any] = {
        "architectures": ["PacelineMockForCausalLM"],
        "model_type": "paceline_mock",
        "vocab_size": 260,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 8192,
        "eos_token_id": EOS_TOKEN_ID,
        **overrides,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    byte_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Token i < 256 is byte i; then the specials, then fillers up to `vocab_size`."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fillers = [f"<|filler{i}|>" for i in range(vocab_size - 256 - len(SPECIALS))]
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in (*SPECIALS, *fillers)]
    )
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
