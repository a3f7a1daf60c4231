"""What a panel is, and the PromQL that panels are written in. Nothing of Grafana in here."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["short", "s", "percentunit", "bytes", "Bps", "reqps", "ops"]

WINDOW = "$__rate_interval"  # Grafana's: four scrapes at least


@dataclass(frozen=True, slots=True)
class Query:
    expression: str  # PromQL
    legend: str  # {{label}} stands for a label's value


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: Unit
    queries: tuple[Query, ...]
    text: str = ""  # what a reader should make of it


@dataclass(frozen=True, slots=True)
class Board:
    uid: str  # name of its file, too
    title: str
    panels: tuple[Panel, ...]


def rate(name: str, by: str = "", selector: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({name}{selector}[{WINDOW}]))"


def quantile(q: float, name: str, by: str = "", selector: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    inner = f"sum by ({labels}) (rate({name}_bucket{selector}[{WINDOW}]))"
    return f"histogram_quantile({q}, {inner})"


def quantiles(name: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, name), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99))


def mean(name: str, by: str) -> str:
    return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"


def share(part: str, whole: str) -> str:
    """Of two counters; 0 while nothing happens."""
    return f"{rate(part)} / clamp_min({rate(whole)}, 1e-9)"
