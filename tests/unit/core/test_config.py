"""Settings in groups: named as if there were none, but under headings in the help."""

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.core.config import Config, made, parse, setting, settings_of
from paceline.core.errors import ConfigError
from paceline.core.tls import TlsConfig
from paceline.gateway.config import GatewayConfig
from paceline.router.config import RouterConfig
from paceline.worker.config import WorkerConfig

MAX_FIELDS = 25


@dataclass(frozen=True, slots=True)
class Shared:
    """What services share."""

    env_prefix: ClassVar[str] = "PACELINE_SHARED_"

    file: Path = setting(Path(), "A file.")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is too much.

    A second paragraph."""

    max_cups: int = setting(3, "Most cups.")
    pour_s: float = setting(1.5, "Longest time.")

    def __post_init__(self) -> None:
        ConfigError.check("max_cups", self.max_cups, self.max_cups > 0, "must be positive")


@dataclass(frozen=True, slots=True)
class TeaConfig:
    """Makes tea."""

    env_prefix: ClassVar[str] = "PACELINE_TEA_"

    name: str = setting("pot", "Its name.")
    bounds: Bounds = Bounds()
    shared: Shared = Shared()


def test_settings_of_a_group_are_named_as_if_there_were_none() -> None:
    environ = {"PACELINE_TEA_POUR_S": "2", "PACELINE_TEA_MAX_CUPS": "4"}
    found = parse(TeaConfig, ["--max-cups", "5", "--name", "kettle"], environ, "tea")
    assert found == TeaConfig("kettle", Bounds(max_cups=5, pour_s=2.0))


def test_a_shared_group_has_names_and_variables_of_its_own() -> None:
    environ = {"PACELINE_TEA_FILE": "/a", "PACELINE_TEA_SHARED_FILE": "/b"}
    assert parse(TeaConfig, [], environ, "tea").shared == Shared()
    assert parse(TeaConfig, [], {"PACELINE_SHARED_FILE": "/c"}, "tea").shared.file == Path("/c")
    assert parse(TeaConfig, ["--shared-file", "/d"], {}, "tea").shared.file == Path("/d")


def test_the_help_has_a_heading_for_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(TeaConfig, ["--help"], {}, "tea")
    _, *parts = capsys.readouterr().out.split("\n\n")[1:]
    assert [part.splitlines()[0] for part in parts] == [
        "options:",
        "How much is too much:",
        "What services share:",
    ]
    assert ["--name" in part for part in parts] == [True, False, False]
    assert ["--max-cups" in part for part in parts] == [False, True, False]
    assert "env: PACELINE_TEA_MAX_CUPS" in parts[1]


def test_a_group_checks_itself() -> None:
    with pytest.raises(ConfigError, match="max_cups=0: must be positive"):
        parse(TeaConfig, ["--max-cups=0"], {}, "tea")
    with pytest.raises(ConfigError, match="pour_s='long': must be a valid float"):
        parse(TeaConfig, ["--pour-s=long"], {}, "tea")


def test_a_config_is_made_of_settings_by_name() -> None:
    given = {"name": "kettle", "pour_s": 0.5, "shared_file": Path("/e")}
    assert made(TeaConfig, given) == TeaConfig("kettle", Bounds(3, 0.5), Shared(Path("/e")))


@pytest.mark.parametrize("config", [GatewayConfig, RouterConfig, WorkerConfig])
def test_no_group_of_settings_is_long_and_no_name_is_there_twice(config: type[Config]) -> None:
    names = [item.name for item in settings_of(config)]
    assert len(names) == len(set(names))
    kinds = typing.get_type_hints(config).values()
    groups = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    assert TlsConfig in groups
    for group in (config, *groups):
        assert len(dataclasses.fields(group)) <= MAX_FIELDS
