"""Draws docs/images/overview.svg: the overview's queries on a deployment under load, for a minute.

    python -m scripts.dashboard_picture

Needs `prometheus` on PATH. The load is that of benchmarks.alerts, with more clients for a while.
"""

import math
import re
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.alert_faults import STEADY, deployed
from benchmarks.prometheus_server import Prometheus, program, prometheus
from deploy.observability.boards import OVERVIEW
from deploy.observability.panels import Panel, Query
from deploy.observability.picture import Series, draw

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/overview.svg"
PHASE_S = 20.0
CLIENTS = (STEADY, 24, STEADY)


def main() -> int:
    if program() is None:
        print("prometheus is not on PATH", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="paceline-picture-") as folder,
        deployed(Path(folder)) as deployment,
        prometheus(deployment.cluster) as server,
    ):
        time.sleep(PHASE_S / 2)
        start = time.time()
        for num_clients in CLIENTS:
            deployment.at_once = num_clients
            time.sleep(PHASE_S)
        end = time.time()
        answers = {panel: answer(server, panel, start, end) for panel in OVERVIEW.panels}
        names = {f"{url.host}:{url.port}": name for name, url in deployment.cluster.urls.items()}
    picture = draw(OVERVIEW, answers, start, end)
    for address, name in names.items():
        picture = picture.replace(address, name)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture)
    return 0


def answer(server: Prometheus, panel: Panel, start: float, end: float) -> list[Series]:
    """Series that are 0 all the time are left out, unless there are no others."""
    found = [
        Series(legend(query, one["metric"]), points(one["values"]))
        for query in panel.queries
        for one in server.query_range(query.expression, start, end)
    ]
    return [one for one in found if any(value for _, value in one.points)] or found[:3]


def legend(query: Query, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda label: labels.get(label[1], ""), query.legend)


def points(values: list[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(at, float(text)) for at, text in values if math.isfinite(float(text))]


if __name__ == "__main__":
    sys.exit(main())
