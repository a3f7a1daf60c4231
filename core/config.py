"""One frozen dataclass a service; command line, environment and help are made from it.

A field `queue_limit: int = setting(64, "…")` of a class with `env_prefix = "PACELINE_ROUTER_"` is
set by, in order: `--queue-limit 8`, `PACELINE_ROUTER_QUEUE_LIMIT=8`, the default. A field whose
type is such a class groups settings that services share: of `tls: TlsConfig`, `ca` is set by
`--tls-ca`, or by PACELINE_TLS_CA, whatever the service.
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from paceline.core.errors import ConfigError

MIN_SECRET_BYTES = 16


class Config(Protocol):
    """A service's configuration: checked in __post_init__, which raises ConfigError."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    env_prefix: ClassVar[str]


C = TypeVar("C", bound=Config)


def setting(default: Any, help: str, *, secret: bool = False) -> Any:
    """A field with one sentence of help. Secrets come from the environment only."""
    return dataclasses.field(default=default, metadata={"help": help, "secret": secret})


def check_secret(secret: str, env_prefix: str) -> None:
    """Raises ConfigError unless `secret` is long enough not to be guessed."""
    if len(secret.encode()) < MIN_SECRET_BYTES:
        reason = (
            f"set {env_prefix}SECRET to the deployment's secret, at least {MIN_SECRET_BYTES} bytes"
        )
        raise ConfigError("secret", "…" if secret else "", reason)


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
    for item in settings_of(config):
        if not item.is_secret:
            add_argument(parser, item)
    arguments = vars(parser.parse_args(argv))
    return _made(config, "", arguments, environ)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that a user can give: `name` is the field's, after the group that it is in."""

    name: str
    variable: str
    kind: Any
    default: Any
    help: str
    is_secret: bool


def settings_of(config: type[Config], group: str = "") -> Iterator[Setting]:
    """In the order in which they are written, those of groups where the group stands."""
    types = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind, name = types[field.name], group + field.name
        if dataclasses.is_dataclass(kind):
            yield from settings_of(typing.cast(type[Config], kind), f"{name}_")
            continue
        variable = config.env_prefix + field.name.upper()
        text, is_secret = field.metadata.get("help", ""), bool(field.metadata.get("secret"))
        yield Setting(name, variable, kind, field.default, text, is_secret)


def _made(
    config: type[C], group: str, arguments: Mapping[str, str | None], environ: Mapping[str, str]
) -> C:
    types = typing.get_type_hints(config)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        kind, name = types[field.name], group + field.name
        if dataclasses.is_dataclass(kind):
            given[field.name] = _made(
                typing.cast(type[Config], kind), f"{name}_", arguments, environ
            )
            continue
        for text in (environ.get(config.env_prefix + field.name.upper()), arguments.get(name)):
            if text is not None:
                given[field.name] = convert(name, text, kind)
    return config(**given)


def add_argument(parser: argparse.ArgumentParser, item: Setting) -> None:
    text = f"{item.help} [default: {default_text(item.default)}; env: {item.variable}]"
    flag = "--" + item.name.replace("_", "-")
    parser.add_argument(flag, dest=item.name, help=text.replace("%", "%%"), metavar="VALUE")


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
