"""Writes what is made from core/metrics.py and panels.py: dashboards, the table in docs/metrics.md.

    python -m deploy.observability.build [--check]

With --check nothing is written; it fails when a file is not what would be written.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos

from deploy.observability.boards import BOARDS
from deploy.observability.metrics_page import with_table
from deploy.observability.panels import Board, Panel

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "deploy/helm/paceline/files/dashboards"
METRICS_PAGE = ROOT / "docs/metrics.md"
COLUMNS, WIDTH, HEIGHT = 2, 12, 8  # in Grafana's grid of 24
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.observability.build")
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check: bool = parser.parse_args().check
    stale = [path for path, text in made() if not path.exists() or path.read_text() != text]
    unknown = {*DASHBOARDS.glob("*.json")} - {path for path, _ in made()}
    if check:
        for path in (*stale, *unknown):
            print(f"{path.relative_to(ROOT)} is not what build.py makes", file=sys.stderr)
        return bool(stale or unknown)
    for path, text in made():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in unknown:
        path.unlink()
    return 0


def made() -> Iterator[tuple[Path, str]]:
    """Each file with its content."""
    for board in BOARDS:
        yield DASHBOARDS / f"{board.uid}.json", dashboard_json(board)
    yield METRICS_PAGE, with_table(METRICS_PAGE.read_text())


def dashboard_json(board: Board) -> str:
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .tags(["paceline"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    )
    for number, panel in enumerate(board.panels):
        builder.with_panel(series_panel(panel, number))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def series_panel(panel: Panel, number: int) -> timeseries.Panel:
    row, column = divmod(number, COLUMNS)
    built = (
        timeseries.Panel()
        .id(number + 1)
        .title(panel.title)
        .description(panel.text)
        .unit(panel.unit)
        .min(0)
        .legend(common.VizLegendOptions().show_legend(True))
        .datasource(SOURCE)
        .grid_pos(GridPos(h=HEIGHT, w=WIDTH, x=column * WIDTH, y=row * HEIGHT))
    )
    for ref_id, query in zip("ABCDEFGH", panel.queries, strict=False):
        built.with_target(
            prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(ref_id)
        )
    return built


if __name__ == "__main__":
    sys.exit(main())
