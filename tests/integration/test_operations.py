"""Every command of docs/operations.md, in its order, against a deployment under load."""

import asyncio
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.alert_faults import KEY, Deployment, deployed
from benchmarks.loadgen import send

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/operations.md").read_text(), re.M | re.S)
BLOCK_S = 90.0  # of one; most take a second
RECOVERY_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def environment(deployment: Deployment) -> dict[str, str]:
    """What the page promises: addresses, and on one machine the ids of processes."""
    processes = deployment.cluster.processes
    named = {"DECODE": "decode-0", "PREFILL": "prefill-0", "ROUTER": "router", "REDIS": "redis"}
    return {
        **deployment.environment(),
        **{f"{name}_PID": str(processes[process].pid) for name, process in named.items()},
        "KEY": KEY,
        "PREFILL_WORKER": "prefill-0",
        "MODEL": deployment.model.name,
        "MODEL_FOLDER": str(deployment.model),
        "COLUMNS": "80",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))),
    }


def run(block: str, deployment: Deployment) -> None:
    command = ["bash", "-c", f"set -eo pipefail\n{block}"]
    variables = environment(deployment)
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=BLOCK_S
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}"


def test_every_command_of_the_page_works_and_the_deployment_outlives_it(
    tmp_path: Path,
) -> None:
    assert len(BLOCKS) > 10
    with deployed(tmp_path, routers=2) as deployment:
        cluster = deployment.cluster
        for block in BLOCKS:
            run(block, deployment)
            cluster.wait_ready()
            cluster.wait_connected(2, RECOVERY_S)
            answer = asyncio.run(send(cluster.base_url, deployment.call()))
            assert answer.is_complete, f"{block}\n{answer.status} {answer.error}"
