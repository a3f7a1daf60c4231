"""Text to ids as Hugging Face does it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from paceline.core.errors import ConfigError, InvalidRequest
from paceline.gateway.messages import Chat
from paceline.gateway.tokenizer import TextModel
from tests.support.gateway_deployment import gateway_config
from tests.support.mock_model import write_mock_model

BOS = 257


def any_length(num_tokens: int) -> None:
    """Refuses nothing."""


def text_model(folder: Path) -> TextModel:
    return TextModel(gateway_config(folder, "127.0.0.1:1"))


@pytest.fixture
def with_bos(tmp_path: Path) -> Path:
    """A tokenizer that puts a BOS first, and a template that writes the same one."""
    folder = write_mock_model(tmp_path)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", BOS)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(path)
    return folder


def test_completions_get_special_tokens_and_rendered_chats_none(with_bos: Path) -> None:
    model = text_model(with_bos)
    assert model.encode("abcdefgh", any_length) == [BOS, *b"abcdefgh"]
    assert model.encode("<|system|>ab", any_length, adds_special=False) == [BOS, *b"ab"]
    assert model.is_only_special(model.encode("", any_length))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {5}),
        ({"generation_config.json": {"eos_token_id": [6, 7]}}, {6, 7}),
        ({"generation_config.json": {}}, {5}),
    ],
)
def test_ids_that_end_a_text(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    folder = write_mock_model(tmp_path, eos_token_id=5)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert text_model(folder).eos_token_ids == expected


def test_a_model_without_a_template_serves_no_chat(tmp_path: Path) -> None:
    folder = write_mock_model(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        text_model(folder).render(Chat([{"role": "user", "content": "x"}]))


def test_a_broken_model_directory_is_a_config_error(tmp_path: Path) -> None:
    folder = write_mock_model(tmp_path)
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match="tokenizer_config.json"):
        text_model(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json"):
        text_model(folder)
