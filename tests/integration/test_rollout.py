"""Rolling restarts of a rendered chart under load: every pod a process, as its manifest says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chart import mounts, pod, rendered, volumes

ROOT = Path(__file__).parents[2]


def skip_without_namespaces() -> None:
    if os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "setpriv"))):
        pytest.skip("needs root, iproute2 and util-linux for namespaces")


@pytest.mark.parametrize(("mib", "fits"), [(256, True), (600, False)])
def test_vllm_37982_a_worker_writes_shared_memory_up_to_what_the_chart_says(
    mib: int, fits: bool, tmp_path: Path
) -> None:
    """https://github.com/vllm-project/vllm/issues/37982: 64 MB of /dev/shm, fixed.

    In a root like that of the worker's container, with the memory volume that its pod mounts.
    """
    skip_without_namespaces()
    spec = pod(rendered(), "decode")
    (found,) = spec["containers"]
    name = mounts(found)["/dev/shm"]["name"]
    size = volumes(spec)[name]["emptyDir"]["sizeLimit"].removesuffix("Mi")
    root = tmp_path / "root"
    root.mkdir()
    sandbox = [
        str(ROOT / "benchmarks" / "sandbox.sh"),
        str(root),
        "10001",
        "true",
        "",
        f"/dev/shm {size}m",
    ]
    write = ["dd", "if=/dev/zero", "of=/dev/shm/x", "bs=1M", f"count={mib}"]
    command = ["unshare", "--mount", *sandbox, "--", *write]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) is fits, done.stderr
    assert fits or "No space left" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kserve_5496_no_request_fails_while_any_role_rolls() -> None:
    """https://github.com/kserve/kserve/pull/5496: SIGTERM aborted running requests.

    Under its 20 requests a second with streams of 60 s, on a clock ten times as fast. Each pod
    says that it is not ready, finishes or hands on what runs, and exits with 0 in its grace period.
    """
    skip_without_namespaces()
    command = [sys.executable, "-P", "-m", "benchmarks.rollout"]
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["requests"] > 500
    for name in ("failed", "truncated", "differing"):
        assert figures[name] == 0, (name, done.stderr[-2000:])
    assert figures["not_seen_unready"] == figures["exits_not_0"] == figures["restarts"] == 0
