"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float], None]  # called with the fraction done, 0 to 1


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Shows `title` and how far it is; the time that it took stands there when it is done."""
    if sys.stderr.isatty():
        with bar(title) as advance:
            yield advance
    else:
        print(f"{title} …", file=sys.stderr, flush=True)
        yield lambda fraction: None


@contextmanager
def bar(title: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as shown:
        task = shown.add_task(title, total=1.0)
        yield lambda fraction: shown.update(task, completed=fraction)
        shown.update(task, completed=1.0)
