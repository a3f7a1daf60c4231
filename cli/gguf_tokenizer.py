"""The tokenizer inside a GGUF file, as tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from paceline.cli.setup_error import SetupError

CONTROL_TOKEN = 3


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """`fields`: the key-values of the GGUF file."""
    build(fields).save(str(folder / "tokenizer.json"))
    text = json.dumps(settings(fields), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def build(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; numbers are split into digits first, as SmolLM was trained."""
    pre = fields["tokenizer.ggml.pre"]
    if pre != "smollm":
        raise SetupError(f"the GGUF file's pre-tokenizer is {pre!r}; only 'smollm' is known")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control_tokens(fields)]
    )
    return tokenizer


def control_tokens(fields: dict[str, Any]) -> list[str]:
    pairs = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in pairs if kind == CONTROL_TOKEN]


def settings(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
