"""Typed access to a config.json that remembers what was read: nothing is ignored silently."""

from collections.abc import Iterable
from typing import Any

from paceline.core.errors import ConfigError

_REQUIRED: Any = object()


class Fields:
    """The fields of one JSON object. `prefix` names the object in errors."""

    def __init__(self, raw: dict[str, Any], prefix: str = "") -> None:
        self.raw = raw
        self._prefix = prefix
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands; an absent field and null both give `default`."""
        self._read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _REQUIRED, minimum: int = 1) -> Any:
        value = self._given(name, default)
        if value is default and default is not _REQUIRED:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, value, f"must be an integer of at least {minimum}")
        return value

    def is_null(self, name: str) -> bool:
        """Given, and null: for fields where that says "none" and is not the default."""
        return self.get(name) is None and name in self.raw

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._given(name, default)
        if value is default and default is not _REQUIRED:
            return value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, value, "must be a number")
        return float(value)

    def flag(self, name: str, default: bool) -> Any:
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "must be true or false")
        return value

    def choice(self, name: str, choices: Iterable[str], default: Any = _REQUIRED) -> str:
        value = self._given(name, default)
        known = sorted(choices)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, value, f"not supported; known: {', '.join(known)}")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._given(name, _REQUIRED)
        plain = isinstance(value, list) and all(type(item) in (int, float) for item in value)
        if not plain:
            raise self.error(name, value, "must be a list of numbers")
        return tuple(map(float, value))

    def unread(self) -> dict[str, Any]:
        return {name: value for name, value in self.raw.items() if name not in self._read}

    def error(self, name: str, value: object, reason: str) -> ConfigError:
        return ConfigError(self._prefix + name, value, reason)

    def _given(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is _REQUIRED:
            raise self.error(name, None, "is missing")
        return value
