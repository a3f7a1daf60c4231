"""One frozen dataclass a service; command line, environment and help are made from it.

A field `queue_limit: int = setting(64, "…")` of a class with `env_prefix = "PACELINE_ROUTER_"` is
set by, in order: `--queue-limit 8`, `PACELINE_ROUTER_QUEUE_LIMIT=8`, the default. A field whose
type is a dataclass is a group, under a heading of its own in the help. Of a class without an
`env_prefix` the settings are named as if they stood in the service's. One with an `env_prefix` is
shared by services: of `tls: TlsConfig`, `ca` is set by `--tls-ca`, or by PACELINE_TLS_CA, whatever
the service.
A positional one needs no name; one that is true or false needs no value.
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard, TypeVar

from paceline.core.errors import ConfigError

MIN_SECRET_BYTES = 16


class Group(Protocol):
    """Settings that belong together: checked in __post_init__, which raises ConfigError. The first
    line of its docstring is its heading."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class Config(Group, Protocol):
    """A service's configuration."""

    env_prefix: ClassVar[str]


C = TypeVar("C", bound=Config)
G = TypeVar("G", bound=Group)


def setting(default: Any, help: str, *, secret: bool = False, positional: bool = False) -> Any:
    """A field with one sentence of help. Secrets come from the environment only."""
    metadata = {"help": help, "secret": secret, "positional": positional}
    return dataclasses.field(default=default, metadata=metadata)


def check_secret(secret: str, env_prefix: str) -> None:
    """Raises ConfigError unless `secret` is long enough not to be guessed."""
    if len(secret.encode()) < MIN_SECRET_BYTES:
        reason = (
            f"set {env_prefix}SECRET to the deployment's secret, at least {MIN_SECRET_BYTES} bytes"
        )
        raise ConfigError("secret", "…" if secret else "", reason)


def check_positive(group: Group, *names: str) -> None:
    """Raises ConfigError for the first of these fields that is not above 0."""
    for name in names:
        value: float = getattr(group, name)
        ConfigError.check(name, value, value > 0, "must be positive")


def check_ports(config: Config, *names: str) -> None:
    """Raises ConfigError for the first of these fields that is no port; 0 picks a free one."""
    for name in names:
        port: int = getattr(config, name)
        ConfigError.check(name, port, 0 <= port < 65536, "must lie between 0 and 65535")


def parse(
    config: type[C],
    argv: Sequence[str],
    environ: Mapping[str, str],
    command: str,
    summary: str | None = None,
) -> C:
    """Reads `config` from arguments and environment. Raises ConfigError; --help exits."""
    parser = argparse.ArgumentParser(
        prog=f"paceline {command}",
        description=summary or config.__doc__,
        epilog=secrets_text(config),
        allow_abbrev=False,  # a setting added later would make abbreviations ambiguous
    )
    places: dict[str, argparse._ActionsContainer] = {"": parser}
    for item in settings_of(config):
        if item.heading not in places:
            places[item.heading] = parser.add_argument_group(item.heading)
        if not item.is_secret:
            add_argument(places[item.heading], item)
    arguments = vars(parser.parse_args(argv))
    given: dict[str, Any] = {}
    for item in settings_of(config):
        for text in (environ.get(item.variable), arguments.get(item.name)):
            if text is not None:
                given[item.name] = convert(item.name, text, item.kind)
    return made(config, given)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that a user can give: `name` is the field's, after that of a shared group."""

    name: str
    variable: str
    kind: Any
    default: Any
    help: str
    is_secret: bool
    heading: str  # none of what no group has
    is_positional: bool = False


def settings_of(
    group: type[Group], prefix: str = "", env_prefix: str = "", heading: str = ""
) -> Iterator[Setting]:
    """In the order in which they are written, those of groups where the group stands."""
    env_prefix = getattr(group, "env_prefix", env_prefix)
    for field, kind in _fields_of(group):
        if _is_group(kind):
            names = _prefix_of(field.name, kind, prefix)
            yield from settings_of(kind, names, env_prefix, _heading_of(kind))
            continue
        variable = env_prefix + field.name.upper()
        text, marks = field.metadata.get("help", ""), field.metadata
        is_secret, is_positional = bool(marks.get("secret")), bool(marks.get("positional"))
        name = prefix + field.name
        yield Setting(name, variable, kind, field.default, text, is_secret, heading, is_positional)


def made(group: type[G], given: Mapping[str, Any], prefix: str = "") -> G:
    """With the settings that are `given` by name, in whatever group, and the defaults of others."""
    own: dict[str, Any] = {}
    for field, kind in _fields_of(group):
        if _is_group(kind):
            own[field.name] = made(kind, given, _prefix_of(field.name, kind, prefix))
        elif prefix + field.name in given:
            own[field.name] = given[prefix + field.name]
    return group(**own)


def _fields_of(group: type[Group]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    types = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        yield field, types[field.name]


def _is_group(kind: Any) -> TypeGuard[type[Group]]:
    return dataclasses.is_dataclass(kind)


def _prefix_of(name: str, group: type[Group], outer: str) -> str:
    """Of the names of a group's settings."""
    return f"{name}_" if hasattr(group, "env_prefix") else outer


def _heading_of(group: type[Group]) -> str:
    return (group.__doc__ or "").partition("\n")[0].rstrip(".")


def add_argument(parser: argparse._ActionsContainer, item: Setting) -> None:
    text = f"{item.help} [default: {default_text(item.default)}; env: {item.variable}]"
    text = text.replace("%", "%%")
    if item.is_positional:
        parser.add_argument(item.name, nargs="?", help=text, metavar=item.name.upper())
        return
    flag = "--" + item.name.replace("_", "-")
    alone: dict[str, Any] = {"nargs": "?", "const": "true"} if item.kind is bool else {}
    parser.add_argument(flag, dest=item.name, help=text, metavar="VALUE", **alone)


def default_text(default: Any) -> str:
    """As it would be given; `none` for what is empty."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    return "none" if default in ("", None, Path()) else str(default)


def secrets_text(config: type[Config]) -> str | None:
    """Of the settings that are no arguments, because other users can read command lines."""
    lines = [f"{item.variable}: {item.help}" for item in settings_of(config) if item.is_secret]
    return f"Set in the environment only: {' '.join(lines)}" if lines else None


def convert(name: str, text: str, kind: Any) -> Any:
    """`text` as `kind`: str, int, float, bool, Path or tuple[str, ...] (comma-separated)."""
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(name, text, "must be true or false")
        return text.lower() in ("true", "1")
    if kind == tuple[str, ...]:
        return tuple(part for part in text.split(",") if part)
    if kind is Path:
        return Path(text).absolute() if text else Path()  # "." is a folder, "" is none
    if kind not in (str, int, float):
        raise TypeError(f"{name}: settings of type {kind} are not supported")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(name, text, f"must be a valid {kind.__name__}") from None
