"""The cgroups above this process, of both versions."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each that may limit us, innermost first. `root`: of /proc and /sys."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version, base = 2, root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            version, base = 1, base / controller
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):  # in a container only the last may be there
            yield version, base / part


def read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
