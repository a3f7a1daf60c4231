"""Draws a dashboard as SVG from answers to its panels' queries: what Grafana plots, plainer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from deploy.observability.panels import Board, Panel, Unit

COLUMNS, WIDTH, HEIGHT = 2, 460, 210  # of panels, in pixels
LEFT, RIGHT, TOP, LINE = 58, 12, 30, 14  # of the plot within its panel; height of a legend's line
COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#a352cc", "#e02f44", "#37872d", "#705da0", "#b877d9")
MOST_SERIES = len(COLOURS)
BACKGROUND, INK, GRID = "#ffffff", "#24292e", "#d8dce0"
FACTORS: dict[Unit, tuple[float, str]] = {
    "s": (1, " s"),
    "percentunit": (100, " %"),
    "bytes": (1 / 1024, " KiB"),
    "Bps": (1e-6, " MB/s"),
    "reqps": (1, "/s"),
    "ops": (1, "/s"),
    "short": (1, ""),
}

Point = tuple[float, float]  # unix seconds, value


@dataclass(frozen=True, slots=True)
class Series:
    legend: str
    points: Sequence[Point]


def draw(board: Board, answers: dict[Panel, list[Series]], start: float, end: float) -> str:
    """`answers`: of each panel of `board`; points lie between `start` and `end`."""
    rows = math.ceil(len(board.panels) / COLUMNS)
    size = f'width="{COLUMNS * WIDTH}" height="{rows * HEIGHT + TOP}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="{BACKGROUND}"/>',
        f'<text x="12" y="20" font-size="15" fill="{INK}">{escape(board.title)}</text>',
    ]
    for number, panel in enumerate(board.panels):
        row, column = divmod(number, COLUMNS)
        lines.append(f'<g transform="translate({column * WIDTH},{row * HEIGHT + TOP})">')
        lines += draw_panel(panel, answers[panel][:MOST_SERIES], start, end)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def draw_panel(panel: Panel, series: list[Series], start: float, end: float) -> Iterator[str]:
    factor, unit = FACTORS[panel.unit]
    highest = max((value for one in series for _, value in one.points), default=0.0) * factor
    top = nice_above(highest)
    legend_rows = math.ceil(len(series) / 3)
    bottom = HEIGHT - LINE * legend_rows - 16
    yield f'<text x="{LEFT}" y="18" font-weight="bold" fill="{INK}">{escape(panel.title)}</text>'
    for part in (0, 0.5, 1):
        y = bottom - part * (bottom - TOP)
        yield f'<path d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}" stroke="{GRID}"/>'
        label = f"{part * top:g}{unit}"
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{INK}">{label}</text>'
    for number, (one, colour) in enumerate(zip(series, COLOURS, strict=False)):
        line = " ".join(
            f"{LEFT + (at - start) / (end - start) * (WIDTH - LEFT - RIGHT):.1f},"
            f"{bottom - value * factor / top * (bottom - TOP):.1f}"
            for at, value in one.points
        )
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        row, column = divmod(number, 3)
        x, y = LEFT + column * 130, bottom + LINE * (row + 1)
        yield f'<rect x="{x}" y="{y - 3}" width="10" height="3" fill="{colour}"/>'
        yield f'<text x="{x + 14}" y="{y + 2}" fill="{INK}">{escape(one.legend)}</text>'


def nice_above(value: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power: float = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
