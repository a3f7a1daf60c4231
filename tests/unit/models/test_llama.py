"""Llama against transformers: every rope scaling, way to compute and field that matters."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from paceline.core.errors import ConfigError
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.support.computing import WAYS, logits
from tests.support.small_configs import LLAMA as SMALL
from tests.support.transformers_models import change_config, logits_of, save_random_model

ORIGINAL = 32
TOKENS = [(i * i * 7 + 3 * i) % 96 for i in range(80)]
SHORT, LONG = [1.0 + 0.1 * i for i in range(4)], [2.0 + 0.9 * i for i in range(4)]


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


VARIANTS: dict[str, dict[str, Any]] = {
    "default": rope("default"),
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=4.0) | {"max_position_embeddings": ORIGINAL},
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL),
    "yarn, all fields": rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=ORIGINAL,
        beta_fast=4.0,
        beta_slow=0.5,
        mscale=0.8,
        mscale_all_dim=0.3,
        truncate=False,
    ),
    "yarn, attention factor": rope(
        "yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, attention_factor=1.3
    ),
    "longrope": rope(
        "longrope",
        short_factor=SHORT,
        long_factor=LONG,
        original_max_position_embeddings=ORIGINAL,
    ),
    "longrope, all fields": rope(
        "longrope",
        short_factor=SHORT,
        long_factor=LONG,
        original_max_position_embeddings=ORIGINAL,
        factor=3.0,
        attention_factor=1.2,
    ),
    "llama3": rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    ),
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own head_dim": {"head_dim": 12},
    "one kv head, gelu": {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    "no groups": {"num_key_value_heads": 4},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@cache
def reference(root: Path, variant: str) -> tuple[PreTrainedModel, torch.Tensor]:
    config = LlamaConfig(**(SMALL | VARIANTS[variant]))
    model = save_random_model(root / variant, config)
    return model, logits_of(model, TOKENS)


def load(folder: Path, max_context_length: int | None = len(TOKENS)) -> Model:
    return load_model(folder, max_context_length=max_context_length).model


def assert_equal_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(folders: Path, variant: str, way: str) -> None:
    _, expected = reference(folders, variant)
    assert expected.std() >= 1
    assert_equal_logits(logits(load(folders / variant), TOKENS, way), expected)


MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("default", {"rope_parameters__rope_theta": 700.0}),
    ("default", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    ("default", {"rms_norm_eps": 0.05}),
    ("default", {"hidden_act": "gelu"}),
    ("default", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    ("default", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
    ("default", {"num_key_value_heads": 4}),
    ("default", {"head_dim": 16}),
    ("default", {"num_hidden_layers": 1}),
    ("default", {"num_hidden_layers": 3}),
    ("default", {"intermediate_size": 64}),
    ("default", {"hidden_size": 64}),
    ("default", {"vocab_size": 100}),
    ("default", {"attention_bias": True}),
    ("default", {"mlp_bias": True}),
    ("default", {"tie_word_embeddings": True}),
    ("tied", {"tie_word_embeddings": False}),
    ("biases", {"attention_bias": False}),
    ("biases", {"mlp_bias": False}),
    ("linear", {"rope_parameters__factor": 5.0}),
    ("dynamic", {"rope_parameters__factor": 5.0}),
    ("dynamic", {"max_position_embeddings": 40}),
    ("yarn", {"rope_parameters__factor": 5.0}),
    ("yarn", {"rope_parameters__original_max_position_embeddings": 24}),
    ("yarn, all fields", {"rope_parameters__beta_fast": 2.0}),
    ("yarn, all fields", {"rope_parameters__beta_slow": 0.2}),
    ("yarn", {"rope_parameters__attention_factor": 1.5}),
    ("yarn", {"rope_parameters__mscale": 2.0, "rope_parameters__mscale_all_dim": 0.5}),
    ("yarn, all fields", {"rope_parameters__truncate": True}),
    ("longrope", {"rope_parameters__long_factor": SHORT}),
    ("longrope", {"rope_parameters__factor": 2.0}),
    ("longrope", {"rope_parameters__attention_factor": 1.5}),
    ("longrope", {"rope_parameters__original_max_position_embeddings": 90}),
    ("longrope", {"max_position_embeddings": 200}),
    ("llama3", {"rope_parameters__factor": 4.0}),
    ("llama3", {"rope_parameters__low_freq_factor": 2.0}),
    ("llama3", {"rope_parameters__high_freq_factor": 8.0}),
    ("llama3", {"rope_parameters__original_max_position_embeddings": 64}),
    ("llama3", {"original_max_position_embeddings": 64}),
]


@pytest.mark.parametrize(("variant", "changes"), MUTATIONS, ids=str)
def test_every_field_that_matters_is_read(
    folders: Path, tmp_path: Path, variant: str, changes: dict[str, Any]
) -> None:
    """A changed field is refused or changes the logits."""
    _, expected = reference(folders, variant)
    folder = Path(shutil.copytree(folders / variant, tmp_path / "changed"))
    change_config(folder, **changes)
    try:
        model = load(folder)
    except ConfigError as error:
        assert error.field
    else:
        changed = (logits(model, TOKENS, "whole") - expected).abs().max()
        assert changed > 1e-3


def test_names_of_older_configs_mean_the_same(folders: Path, tmp_path: Path) -> None:
    _, expected = reference(folders, "llama3")
    folder = Path(shutil.copytree(folders / "llama3", tmp_path / "old"))
    scaling = {**VARIANTS["llama3"]["rope_parameters"]}
    scaling["type"] = scaling.pop("rope_type")
    change_config(
        folder, rope_parameters=..., rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling
    )
    assert_equal_logits(logits(load(folder), TOKENS, "whole"), expected)


def test_dynamic_frequencies_are_fixed_to_the_served_context(folders: Path) -> None:
    model, _ = reference(folders, "dynamic")
    folder = folders / "dynamic"
    plain = load(folder, max_context_length=None)
    assert plain.context_length == ORIGINAL
    within = TOKENS[: ORIGINAL - 1]  # transformers forgets a longer sequence below the original
    assert_equal_logits(logits(plain, within, "decode"), logits_of(model, within))
    logits_of(model, TOKENS)  # transformers keeps the base of the longest sequence that it saw
    longer = TOKENS[:50]
    assert_equal_logits(logits(load(folder), longer, "chunks"), logits_of(model, longer))
    with pytest.raises(ConfigError, match="max_context_length=129: must lie between 1 and 128"):
        load(folder, max_context_length=129)


def test_longrope_takes_the_factors_of_the_served_context(folders: Path) -> None:
    model, _ = reference(folders, "longrope")
    short = load(folders / "longrope", max_context_length=ORIGINAL)
    within = TOKENS[:ORIGINAL]
    expected = logits_of(model, within)
    assert_equal_logits(logits(short, within, "decode"), expected)
    long = load(folders / "longrope", max_context_length=None)
    assert (logits(long, within, "whole") - expected).abs().max() > 1e-2


@pytest.mark.parametrize("variant", ["dynamic", "longrope"])
def test_kv_of_other_frequencies_has_another_name(folders: Path, variant: str) -> None:
    reference(folders, variant)
    longer = load_model(folders / variant, max_context_length=len(TOKENS))
    again = load_model(folders / variant, max_context_length=len(TOKENS))
    short = load_model(folders / variant, max_context_length=ORIGINAL)
    assert longer.content_digest == again.content_digest != short.content_digest


def test_the_served_context_alone_does_not_rename_kv(folders: Path) -> None:
    reference(folders, "default")
    digests = {
        load_model(folders / "default", max_context_length=n).content_digest for n in (None, 50)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters__rope_type": "mrope"}, "rope_parameters.rope_type='mrope': not supp"),
        ({"rope_parameters__mystery": 2}, "rope_parameters.mystery=2: is not a field of"),
        ({"sliding_window": 64}, "sliding_window=64: is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "xielu"}, "hidden_act='xielu': not supported; known: gelu, "),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two': must be an integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small': must be a number"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
        ({"architectures": ["FalconForCausalLM"]}, "known: GPT2LMHeadModel, Gemma2ForCausalLM, "),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    folders: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    reference(folders, "default")
    folder = Path(shutil.copytree(folders / "default", tmp_path / "changed"))
    change_config(folder, **changes)
    with pytest.raises(ConfigError) as raised:
        load(folder)
    assert message in str(raised.value)
