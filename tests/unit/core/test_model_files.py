import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.model_files import eos_token_ids, read_json


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        (None, {}, ()),
        (None, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 2}, (7, 9)),
        ({"eos_token_id": None}, {"eos_token_id": 2}, (2,)),
        ({"temperature": 1}, {"eos_token_id": [2]}, (2,)),
    ],
)
def test_generation_config_decides_what_ends_a_text(
    tmp_path: Path, generation: object, own: object, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(own))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("ids", [True, -1, "2", [2, None]])
def test_an_end_that_is_no_token_is_a_config_error(tmp_path: Path, ids: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize("content", ["[", "[1]", "\xff", "[" * 100_000])
def test_what_is_no_json_object_is_a_config_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_json(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json(tmp_path / "none.json")
