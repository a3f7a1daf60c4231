"""Rolling restarts of a rendered chart under load: every pod a process, as its manifest says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kserve_5496_no_request_fails_while_any_role_rolls() -> None:
    """https://github.com/kserve/kserve/pull/5496: SIGTERM aborted running requests.

    Each pod says that it is not ready, finishes what runs, and exits with 0 in its grace period.
    """
    if os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "setpriv"))):
        pytest.skip("needs root, iproute2 and util-linux for namespaces")
    command = [sys.executable, "-P", "-m", "benchmarks.rollout", "--quick"]
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["requests"] > 30
    for name in ("failed", "truncated", "differing"):
        assert figures[name] == 0, (name, done.stderr[-2000:])
    assert figures["not_seen_unready"] == figures["exits_not_0"] == figures["restarts"] == 0
