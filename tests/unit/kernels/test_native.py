"""Which instructions the compiled module uses."""

import os
import subprocess
import sys

import pytest

SHOW = "from paceline.kernels import _native; print(_native.BEST_LEVEL)"


def imported(max_isa: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PACELINE_MAX_ISA": max_isa,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, "-P", "-c", SHOW], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(("max_isa", "most"), [("portable", 0), ("avx2", 1), ("avx512", 2)])
def test_uses_no_more_than_is_allowed(max_isa: str, most: int) -> None:
    best = int(imported("").stdout)
    assert int(imported(max_isa).stdout) == min(best, most)


def test_refuses_an_unknown_instruction_set() -> None:
    assert "ValueError: PACELINE_MAX_ISA=sse9: must be portable" in imported("sse9").stderr
