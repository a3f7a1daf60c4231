"""Draws what benchmarks.two_cards has found: its JSON line on stdin, an SVG on stdout.

    python -m benchmarks.two_cards | python -m benchmarks.two_cards_plot > docs/two-cards.svg

The 99th percentile of the time between tokens of 64 streams over the rate of long prompts, on a
logarithmic scale, beside vLLM 0.25.1 on two such cards.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

RATES = (0, 2, 4, 6)
VLLM_SPLIT = (8.7, 108.0, 113.0, 116.0)
VLLM_WHOLE = (7.3, 15.0, 192.0, 196.0)
WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 470, 40, 310  # of the plot's area
TICKS_MS = (5, 10, 20, 50, 100, 200)
FONT = "font-family='sans-serif' font-size='12'"


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    color: str
    dashes: str
    values_ms: tuple[float, ...]


def x_of(rate: float) -> float:
    return LEFT + 15 + (RIGHT - LEFT - 30) * rate / max(RATES)


def y_of(milliseconds: float) -> float:
    low, high = math.log(TICKS_MS[0]), math.log(TICKS_MS[-1] * 1.2)
    return BOTTOM - (BOTTOM - TOP) * (math.log(milliseconds) - low) / (high - low)


def text(x: float, y: float, content: str, anchor: str = "middle", color: str = "#333") -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {place} fill='{color}' {FONT}>{content}</text>"


def axes() -> list[str]:
    parts = [f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"]
    for tick in TICKS_MS:
        y = y_of(tick)
        parts.append(f"<path d='M{LEFT} {y:.1f}H{RIGHT}' stroke='#ddd'/>")
        parts.append(text(LEFT - 8, y + 4, str(tick), "end"))
    parts += [text(x_of(rate), BOTTOM + 20, str(rate)) for rate in RATES]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, "prompts of 8000 tokens a second"))
    parts.append(text(LEFT, TOP - 16, "time between tokens, 99th percentile, ms", "start"))
    return parts


def drawn(line: Line) -> list[str]:
    points = [(x_of(rate), y_of(ms)) for rate, ms in zip(RATES, line.values_ms, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f"fill='none' stroke='{line.color}' stroke-width='2' stroke-dasharray='{line.dashes}'"
    dots = [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{line.color}'/>" for x, y in points]
    return [f"<polyline points='{path}' {style}/>", *dots]


def labels(lines: list[Line]) -> list[str]:
    """At the lines' ends, apart from each other."""
    parts, lowest = [], -math.inf
    for line in sorted(lines, key=lambda line: -line.values_ms[-1]):
        lowest = max(y_of(line.values_ms[-1]) + 4, lowest + 16)
        shown = f"{line.label}: {line.values_ms[-1]:.0f}"
        parts.append(text(RIGHT + 4, lowest, shown, "start", line.color))
    return parts


def svg(figures: Mapping[str, float]) -> str:
    split, whole = (
        tuple(figures[f"{prefix}itl_p99_ms_{rate}"] for rate in RATES) for prefix in ("", "whole_")
    )
    lines = [
        Line("Paceline, split", "#0a7a3c", "", split),
        Line("Paceline, whole", "#1f5fbf", "", whole),
        Line("vLLM, split", "#c0392b", "6 4", VLLM_SPLIT),
        Line("vLLM, whole", "#e08e0b", "6 4", VLLM_WHOLE),
    ]
    parts = [*axes(), *(part for line in lines for part in drawn(line)), *labels(lines)]
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}'>"
    return "\n".join([head, *parts, "</svg>"])


if __name__ == "__main__":
    print(svg(json.loads(sys.stdin.read().splitlines()[-1])["figures"]))
