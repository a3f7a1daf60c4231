import os
from typing import Any

import pytest

from paceline.core.config import parse
from paceline.core.errors import ConfigError
from paceline.router.config import RouterConfig


def test_defaults_need_the_secret_only() -> None:
    config = parse(RouterConfig, [], {"PACELINE_ROUTER_SECRET": "s" * 16}, "router")
    assert (config.host, config.port, config.probe_port) == ("127.0.0.1", 9100, 9101)
    assert config.split_min_tokens == 32
    with pytest.raises(ConfigError, match="set PACELINE_ROUTER_SECRET"):
        parse(RouterConfig, [], {}, "router")


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"probe_port": -1},
        {"redis_url": "http://nowhere"},
        {"queue_limit": 0},
        {"queue_tokens": 0},
        {"dead_after_s": 0.0},
        {"dead_after_s": 1.5},
        {"beat_s": 2.0},
        {"split_min_tokens": -1},
        {"index_mib": 1},
        {"drain_timeout_s": -1.0},
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any]) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(ConfigError) as wrong:
        RouterConfig(**{"secret": "s" * 16, **fields})
    assert wrong.value.field == name and repr(value) in wrong.value.message


def test_a_secret_that_can_be_guessed_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="at least 16 bytes") as wrong:
        RouterConfig(secret="s" * 15)
    assert "sss" not in wrong.value.message


def test_the_secret_never_comes_from_arguments() -> None:
    with pytest.raises(SystemExit):
        parse(RouterConfig, ["--secret", "s"], dict(os.environ), "router")
