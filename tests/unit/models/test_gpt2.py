"""GPT-2 against transformers: every variant, every way to compute, every field that matters."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

from paceline.core.errors import ConfigError
from paceline.models.loader import load_model
from tests.support.computing import WAYS, logits
from tests.support.small_configs import GPT2 as SMALL
from tests.support.transformers_models import change_config, logits_of, save_random_model

TOKENS = [(i * i * 5 + i) % 90 for i in range(80)]
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "by layer": {"scale_attn_by_inverse_layer_idx": True},
    "unscaled": {"scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True},
    "untied, relu, own inner size": {
        "tie_word_embeddings": False,
        "activation_function": "relu",
        "n_inner": 40,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpt2")


@cache
def reference(root: Path, variant: str) -> torch.Tensor:
    model = save_random_model(root / variant, GPT2Config(**(SMALL | VARIANTS[variant])))
    return logits_of(model, TOKENS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(folders: Path, variant: str, way: str) -> None:
    expected = reference(folders, variant)
    assert expected.std() >= 1
    found = logits(load_model(folders / variant).model, TOKENS, way)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu2", "mish"])
def test_activations_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = save_random_model(tmp_path, GPT2Config(**SMALL, activation_function=name))
    found = logits(load_model(tmp_path).model, TOKENS, "whole")
    torch.testing.assert_close(found, logits_of(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_head": 2},
        {"n_head": 5},
        {"n_embd": 64},
        {"n_layer": 2},
        {"n_layer": 4},
        {"n_inner": 100},
        {"n_positions": 100},
        {"vocab_size": 91},
        {"activation_function": "gelu"},
        {"layer_norm_epsilon": 0.05},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"tie_word_embeddings": False},
        {"add_cross_attention": True},
    ],
    ids=str,
)
def test_every_field_that_matters_is_read(
    folders: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A changed field is refused or changes the logits."""
    expected = reference(folders, "default")
    folder = Path(shutil.copytree(folders / "default", tmp_path / "changed"))
    change_config(folder, **changes)
    try:
        model = load_model(folder).model
    except ConfigError as error:
        assert error.field
    else:
        assert (logits(model, TOKENS, "whole") - expected).abs().max() > 1e-4


def test_names_of_the_first_checkpoints_are_understood(folders: Path, tmp_path: Path) -> None:
    """Without `transformer.`, with the causal masks that they carried."""
    expected = reference(folders, "default")
    folder = Path(shutil.copytree(folders / "default", tmp_path / "first"))
    path = folder / "model.safetensors"
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96).tril() for i in range(3)}
    save_file(tensors, path)
    found = logits(load_model(folder).model, TOKENS, "whole")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
