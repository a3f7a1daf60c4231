import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from paceline.cli.gguf_model import convert, shortest, to_bfloat16
from paceline.cli.setup_error import SetupError
from tests.unit.cli.tiny_gguf import hugging_face_weights, write_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf")
    seen: list[float] = []
    convert(folder / "tiny.gguf", folder / "model", seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    return folder / "model"


def test_weights_come_out_under_their_names_with_the_rope_order_restored(converted: Path) -> None:
    found = load_file(converted / "model.safetensors")
    expected = hugging_face_weights()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), torch.from_numpy(values)), name


def test_config_says_what_the_file_says(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()


def test_tokenizer_splits_digits_merges_letters_and_knows_specials(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("hello 11").tokens == ["hel", "l", "o", "Ġ", "1", "1"]
    assert tokenizer.encode("he<|im_end|>").ids[-1] == 2
    text = "naïve 11 x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    settings = json.loads((converted / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"
    assert settings["eos_token"] == "<|im_end|>"


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", pre_tokenizer="llama-bpe")
    with pytest.raises(SetupError, match="'llama-bpe'; only 'smollm' is known"):
        convert(tmp_path / "other.gguf", tmp_path / "model", lambda fraction: None)


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    values = np.random.default_rng(1).standard_normal(10_000, dtype=np.float32)
    ties = (np.arange(64, dtype=np.uint32) << 15 | 0x3F800000).view(np.float32)
    values = np.concatenate([values, ties, np.float32([0.0, -0.0, 1e-40, 3e38])])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(to_bfloat16(values), expected.view(np.uint16))


def test_float32_noise_in_constants_is_dropped() -> None:
    assert shortest(float(np.float32(1e-5))) == 1e-5
    assert shortest(100000.0) == 100000.0
