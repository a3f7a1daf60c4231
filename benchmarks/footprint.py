"""Memory of a worker's processes, counted as if they were alone on the machine.

Private pages of each process, and each page of a file once, even if several map it (`smaps` per
mapping, because libraries are shared with unrelated processes too). The page pool, a memfd, is
left out: it is as large as it was told to be.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

POOL_PREFIX = "/memfd:"
Mapping = tuple[str, str, int, int]  # (inode, path, private KiB, shared KiB)


def resident_bytes(pid: int) -> int:
    """Of a process and its children, without page pools."""
    front = psutil.Process(pid)
    private = 0
    files: dict[tuple[str, str], int] = {}
    for process in [front, *front.children(recursive=True)]:
        mine: dict[tuple[str, str], int] = {}
        for inode, path, private_kib, shared_kib in mappings(process.pid):
            if path.startswith(POOL_PREFIX):
                continue
            private += private_kib
            mine[inode, path] = mine.get((inode, path), 0) + shared_kib
        for name, kib in mine.items():
            files[name] = max(files.get(name, 0), kib)
    return (private + sum(files.values())) << 10


def mappings(pid: int) -> Iterator[Mapping]:
    inode = path = ""
    sizes = {"Private": 0, "Shared": 0}
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            if inode:
                yield inode, path, sizes["Private"], sizes["Shared"]
            inode, path = words[4], " ".join(words[5:])
            sizes = {"Private": 0, "Shared": 0}
        elif words[0] in ("Private_Clean:", "Private_Dirty:", "Shared_Clean:", "Shared_Dirty:"):
            sizes[words[0].partition("_")[0]] += int(words[1])
    if inode:
        yield inode, path, sizes["Private"], sizes["Shared"]
