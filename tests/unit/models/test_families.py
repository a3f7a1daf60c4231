"""Families against transformers: every variant, every way to compute, every field that matters."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.core.errors import ConfigError
from paceline.models.base import Model
from paceline.models.fields import Fields
from paceline.models.loader import load_model
from paceline.models.registry import ModelSource, find_model
from tests.support.batches import Sequence, new_pool, run
from tests.support.computing import WAYS, logits
from tests.support.families import FAMILIES, FULL, SLIDING, Changes
from tests.support.transformers_models import change_config, logits_of, save_random_model

TOKENS = [(i * i * 7 + 3 * i) % 96 for i in range(80)]
VARIANTS = [
    (family, variant) for family, f in FAMILIES.items() for variant in ("default", *f.variants)
]
MUTATIONS = [
    (name, *mutation) for name, family in FAMILIES.items() for mutation in family.mutations
]
REFUSED = [(name, *refused) for name, family in FAMILIES.items() for refused in family.refused]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def reference(root: Path, family: str, variant: str) -> torch.Tensor:
    config_class = getattr(transformers, FAMILIES[family].config_class)
    config = config_class(**FAMILIES[family].config(variant))
    return logits_of(save_random_model(root / family / variant, config), TOKENS)


def load(folder: Path) -> Model:
    return load_model(folder, max_context_length=len(TOKENS)).model


def changed(folders: Path, target: Path, family: str, variant: str, changes: Changes) -> Path:
    reference(folders, family, variant)
    folder = Path(shutil.copytree(folders / family / variant, target / "changed"))
    change_config(folder, **changes)
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_logits_equal_those_of_transformers(
    folders: Path, family: str, variant: str, way: str
) -> None:
    expected = reference(folders, family, variant)
    assert expected.std() >= 1
    found = logits(load(folders / family / variant), TOKENS, way)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_exact_as_in_transformers(folders: Path, family: str) -> None:
    expected = reference(folders, family, "default")
    folder = folders / family / "default"
    other = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    theirs = typical_error(logits_of(other, TOKENS), expected)
    model = load_model(folder, dtype="bfloat16", max_context_length=len(TOKENS)).model
    ours = typical_error(logits(model, TOKENS, "whole"), expected)
    assert 0 < ours < 1.3 * theirs


def typical_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of the median row: where rounding changes the choice of an expert, a row is far off."""
    return (found.float() - expected).square().mean(dim=-1).sqrt().median()


@pytest.mark.parametrize(("family", "variant", "changes"), MUTATIONS, ids=str)
def test_every_field_that_matters_is_read(
    folders: Path, tmp_path: Path, family: str, variant: str, changes: Changes
) -> None:
    """A changed field is refused or changes the logits."""
    folder = changed(folders, tmp_path, family, variant, changes)
    try:
        model = load(folder)
    except ConfigError as error:
        assert error.field
    else:
        found = logits(model, TOKENS, "whole")
        assert (found - reference(folders, family, variant)).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=str)
def test_what_cannot_be_honoured_is_refused_by_name(
    folders: Path, tmp_path: Path, family: str, changes: Changes, message: str
) -> None:
    folder = changed(folders, tmp_path, family, "default", changes)
    with pytest.raises(ConfigError) as raised:
        load(folder)
    assert message in str(raised.value)


def read_config(architecture: str, raw: dict[str, Any]) -> object:
    fields = Fields(raw | {"architectures": [architecture]})
    source = ModelSource(
        folder=Path(),
        fields=fields,
        device=torch.device("cpu"),
        dtype=torch.float32,
        eos_token_ids=(),
        max_context_length=None,
        progress=lambda done, total: None,
    )
    _, found = find_model(fields)
    return found.read_config(source)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    default = getattr(transformers, FAMILIES[family].config_class)()
    raw = json.loads(default.to_json_string(use_diff=False))
    architecture = FAMILIES[family].architecture
    assert read_config(architecture, {}) == read_config(architecture, raw)


def test_names_of_older_gemma_3_configs_mean_the_same(folders: Path, tmp_path: Path) -> None:
    old = {
        "rope_parameters": ...,
        "layer_types": ...,
        "rope_theta": 900.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 3,
    }
    folder = changed(folders, tmp_path, "gemma3", "default", old)
    expected = reference(folders, "gemma3", "default")
    torch.testing.assert_close(logits(load(folder), TOKENS, "whole"), expected, rtol=0, atol=1e-4)


def test_names_of_older_phi_3_configs_mean_the_same(folders: Path, tmp_path: Path) -> None:
    scaling = FAMILIES["phi3"].variants["longrope, partial"]["rope_parameters"]
    old = {
        "rope_parameters": ...,
        "rope_theta": scaling["rope_theta"],
        "partial_rotary_factor": scaling["partial_rotary_factor"],
        "rope_scaling": {
            "type": "su",
            "short_factor": scaling["short_factor"],
            "long_factor": scaling["long_factor"],
        },
    }
    folder = changed(folders, tmp_path, "phi3", "longrope, partial", old)
    expected = reference(folders, "phi3", "longrope, partial")
    torch.testing.assert_close(logits(load(folder), TOKENS, "whole"), expected, rtol=0, atol=1e-4)


def test_a_window_needs_no_kv_before_it(folders: Path) -> None:
    """What lies in pages that every window has left is never read."""
    reference(folders, "mistral", "default")
    model = load(folders / "mistral" / "default")
    pool = new_pool(model, 8)
    sequence = Sequence([3, 1, 5, 2, 6])
    run(model, pool, [(sequence, TOKENS[:60])])
    pool[[3, 1]] = float("nan")  # tokens 0 to 31; the window of token 60 begins at 41
    found = run(model, pool, [(sequence, TOKENS[60:61])])
    torch.testing.assert_close(
        found[0], reference(folders, "mistral", "default")[60], rtol=0, atol=1e-4
    )


def test_layer_types_decide_the_attention_of_each_layer() -> None:
    names = [SLIDING, FULL, SLIDING]
    raw = FAMILIES["gemma2"].config("default") | {"layer_types": names}
    config = read_config("Gemma2ForCausalLM", raw)
    windows = [attention.window for attention in config.attentions]  # type: ignore[attr-defined]
    assert windows == [20, 0, 20]
