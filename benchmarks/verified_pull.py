"""A pull of the same pages again and again, as a worker's thread makes it."""

import threading
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import show
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import CellSums, Link, PageIds
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.kv_transfer.pull import PinnedPages, pull_verified

LIMIT_S = 60.0


def verified_pull(
    link: Link, group: PageGroup, sums: CellSums, source_pages: PageIds, pages: PageIds
) -> Callable[[], None]:
    """What pulls `source_pages` into `pages`. `sums`: those of all pages of the source. Raises
    KvMismatch for a page that is not what the source has."""
    generations = np.zeros(len(pages), np.uint64)
    pinned = PinnedPages(source_pages, pages, generations, sums[source_pages])
    figures = LinkStatistics(group)  # learns how large a piece may be

    def pull() -> None:
        pull_verified(
            link,
            pinned,
            figures,
            deadline=time.monotonic() + LIMIT_S,
            cancelled=threading.Event(),
            report=lambda page, generation: show(f"page {page} arrived wrong"),
        )

    return pull
