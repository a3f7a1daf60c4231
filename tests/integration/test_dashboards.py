"""Every panel shows data, and no alert fires, on a healthy deployment under load."""

import time
from pathlib import Path

import pytest

from benchmarks.alert_faults import deployed
from benchmarks.alerts import WARM_S, empty_panels
from benchmarks.prometheus_server import program, prometheus

pytestmark = pytest.mark.slow


def test_every_panel_shows_data_and_nothing_fires(tmp_path: Path) -> None:
    if program() is None:
        pytest.skip("prometheus is not on PATH; CONTRIBUTING.md tells where it comes from")
    with (
        deployed(tmp_path) as deployment,
        prometheus(deployment.cluster, deployment.rebalance_port) as server,
    ):
        time.sleep(WARM_S)
        assert all(rule["health"] == "ok" for rule in server.rules())
        assert empty_panels(server) == []
        assert server.firing() == set()
