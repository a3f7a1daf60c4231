"""The table of all metrics in docs/metrics.md, from core/metrics.py."""

from paceline.core.metric_labels import LABELS
from paceline.core.metrics import ALL, Metric

BEGIN, END = "<!-- table: made by deploy/observability/build.py -->", "<!-- end of table -->"


def with_table(page: str) -> str:
    """`page` with the table as it should be between the two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, "", *rows(), "", *label_rows(), "", END + tail])


def rows() -> list[str]:
    lines = [_row(metric) for metric in ALL]
    return ["| metric | type | labels | |", "| --- | --- | --- | --- |", *lines]


def label_rows() -> list[str]:
    lines = [f"| `{name}` | {values} |" for name, values in LABELS.items()]
    return ["| label | values |", "| --- | --- |", *lines]


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric}` | {metric.kind} | {labels} | {metric.help} |"
