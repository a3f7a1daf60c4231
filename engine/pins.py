"""Pins the pages of a reader's request: by name what leads of each run, by slot its tails."""

from paceline.engine.messages import Pin, Pinned, PinnedPage
from paceline.engine.prefix_cache import PrefixCache


def pin_for_reader(cache: PrefixCache, call: Pin) -> Pinned:
    """Takes the pool's lock for as long as a dictionary lookup a page takes."""
    pool = cache.pool
    with pool.lock:
        runs = [
            [_pinned(cache, page) for page in cache.pin_run(run.keys, run.group)]
            for run in call.runs
        ]
        tail = None if call.tail_slot is None else cache.tails.get(call.tail_slot)
        if tail is None:
            return Pinned(runs)
        tails = []
        for page, checksums in zip(tail.pages, tail.checksums, strict=True):
            pinned = pool.pin(page)
            assert pinned, "the slot refers to it: pinning takes nothing"
            tails.append(PinnedPage(page, pool.pages[page].generation, list(checksums)))
        return Pinned(runs, tails, tail.num_tokens)


def _pinned(cache: PrefixCache, page: int) -> PinnedPage:
    record = cache.pool.pages[page]
    return PinnedPage(page, record.generation, list(record.checksums))
