"""A process that exports KV pages while a benchmark reads them."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def source_process(serve: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """What `serve(channel, *arguments)` sends first: its addresses. It returns when the channel
    closes, at the end of the block."""
    spawn = multiprocessing.get_context("spawn")
    channel, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield channel.recv()
    finally:
        channel.close()
        process.join()
