"""Reading weights: single and sharded files, types, and what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError
from paceline.models.loader import load_model
from tests.support.computing import logits
from tests.support.tiny_models import write_tiny_llama

PATH = "model.safetensors"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6] * 7


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    found = load_file(folder / PATH)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    save_file(found, folder / PATH)


def shard(folder: Path) -> None:
    tensors = load_file(folder / PATH)
    weight_map = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        names = sorted(tensors)[i::2]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / PATH).unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_one_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    expected = logits(load_model(tmp_path).model, TOKENS, "whole")
    shard(tmp_path)
    assert torch.equal(logits(load_model(tmp_path).model, TOKENS, "whole"), expected)


def test_bfloat16_files_are_widened_exactly(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "narrow", dtype=torch.bfloat16)
    write_tiny_llama(tmp_path / "wide")
    wide = load_file(tmp_path / "wide" / PATH)
    rounded = {name: tensor.bfloat16().float() for name, tensor in wide.items()}
    save_file(rounded, tmp_path / "wide" / PATH)
    models = [load_model(tmp_path / name).model for name in ("narrow", "wide")]
    assert torch.equal(*(logits(model, TOKENS, "whole") for model in models))
    assert models[0].weight_bytes() == models[1].weight_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_held_once(tmp_path: Path, tied: bool) -> None:
    write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    num_elements = sum(tensor.numel() for tensor in load_file(tmp_path / PATH).values())
    assert load_model(tmp_path).model.weight_bytes() == 4 * num_elements


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    calls: list[tuple[int, int]] = []
    load_model(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert len(calls) > 10
    assert calls == sorted(calls)
    assert calls[-1] == ((tmp_path / PATH).stat().st_size,) * 2


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change(tmp_path, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(
        ConfigError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight.*\(16, 32\)"
    ):
        load_model(tmp_path)


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change(tmp_path, model__norm__weight=torch.ones(31))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*\(31,\), \(32,\) is needed"):
        load_model(tmp_path)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change(tmp_path, model__layers__0__self_attn__q_norm__weight=torch.ones(8))
    with pytest.raises(ConfigError, match=r"q_norm.*\(8,\) has no place"):
        load_model(tmp_path)


def test_a_tensor_of_integers_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    change(tmp_path, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(ConfigError, match="torch.int8 is not supported"):
        load_model(tmp_path)


def test_a_tied_output_layer_may_be_stored_but_not_differ(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / PATH)["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone())
    load_model(tmp_path)
    change(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ConfigError, match="differs from model.embed_tokens.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b'{"a": 1}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / PATH).write_bytes(content)
    with pytest.raises(ConfigError, match="model.safetensors.*cannot be read"):
        load_model(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    content = (tmp_path / PATH).read_bytes()
    (tmp_path / PATH).write_bytes(content[:-10])
    with pytest.raises(ConfigError, match="model.safetensors.*cannot be read"):
        load_model(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / PATH).unlink()
    with pytest.raises(ConfigError, match="model.safetensors.*file is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "../outside.safetensors"}}, "must be a safetensors file beside"),
        ({"weight_map": {"a": "weights.bin"}}, "must be a safetensors file beside"),
        ({"weight_map": {"a": PATH}}, "in none of its files"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, index: object, message: str) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text("{nope")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_model(tmp_path)
