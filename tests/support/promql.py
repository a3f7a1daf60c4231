"""Which metrics and labels a PromQL expression names; enough of its grammar for our own."""

import re
from dataclasses import dataclass

from paceline.core.metrics import ALL

_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_WORDS = {
    *(
        "sum",
        "min",
        "max",
        "count",
        "rate",
        "increase",
        "histogram_quantile",
        "clamp_min",
        "vector",
    ),
    *("time", "min_over_time", "count_over_time", "or", "and", "unless", "bool"),
}
ADDED_BY_PROMETHEUS = frozenset({"instance", "job", "le"})
LABELS_BY_SERIES = {name: frozenset(metric.labels) for metric in ALL for name in metric.samples}


@dataclass(frozen=True, slots=True)
class Named:
    series: frozenset[str]
    labels: frozenset[str]  # in matchers and groupings


def named_in(expression: str) -> Named:
    grouped = {
        label.strip() for found in _GROUPING.findall(expression) for label in found.split(",")
    }
    rest = _GROUPING.sub(" ", expression)
    matched = set(_MATCHER.findall(rest))
    rest = re.sub(r"\{[^}]*\}|\[[^\]]+\]", " ", rest)
    words = set(re.findall(r"(?<![\w.])[a-zA-Z_:][\w:]*", rest))
    return Named(frozenset(words - _WORDS), frozenset((grouped | matched) - {""}))


def problems(expression: str) -> list[str]:
    """Series that no service exports, and labels that none of the named series has."""
    named = named_in(expression)
    unknown = sorted(named.series - LABELS_BY_SERIES.keys())
    known = ADDED_BY_PROMETHEUS.union(*(LABELS_BY_SERIES.get(s, ()) for s in named.series))
    return [f"no metric {name}" for name in unknown] + [
        f"no label {label} in {expression}" for label in sorted(named.labels - known)
    ]
