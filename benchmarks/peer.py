"""Runs a script of benchmarks/peers under the interpreter of that peer's own environment."""

import json
import os
import subprocess
from pathlib import Path

from benchmarks.common import ROOT, show

SCRIPTS = ROOT / "benchmarks" / "peers"
INTERPRETERS = {
    "vllm_cpu": "PACELINE_PEER_VLLM",
    "vllm_front": "PACELINE_PEER_VLLM",
    "llamacpp": "PACELINE_PEER_LLAMA",
    "dynamo_radix": "PACELINE_PEER_DYNAMO",
}
TIMEOUT_S = 1800.0
RANK_THREADS = "GOMP_SPINCOUNT"  # what a rank sets for itself (common.run_in); not for peers


def peer_command(name: str, *arguments: str) -> list[str]:
    """Raises SystemExit, saying what to do, where the peer is not installed."""
    variable = INTERPRETERS[name]
    interpreter = os.environ.get(variable, "")
    if not Path(interpreter).is_file():
        raise SystemExit(
            f"{variable} must name a Python that has the peer; see {SCRIPTS}/README.md"
        )
    return [interpreter, str(SCRIPTS / f"{name}.py"), *arguments]


def peer_figures(name: str, *arguments: str) -> dict[str, float]:
    """Raises SystemExit, as `peer_command` and where the peer fails."""
    command = peer_command(name, *arguments)
    show(f"peer {name}")
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        env={key: value for key, value in os.environ.items() if key != RANK_THREADS},
    )
    if done.returncode:
        raise SystemExit(f"peer {name} failed with status {done.returncode}")
    # What a peer logs at its end may go to stdout, too.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    figures: dict[str, float] = json.loads(lines[-1])
    return figures
