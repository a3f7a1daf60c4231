"""Sources that lay KV out otherwise: what to pin there, and which pages of ours it fills.

A pull names what it wants by page groups of ours; the source pins by its own.
"""

from collections.abc import Sequence

from paceline.core.errors import IncompatiblePeer
from paceline.core.kv_layout import HeadRange
from paceline.engine.messages import GrantedRun
from paceline.kv_transfer.layout_map import MAX_RANKS, LayoutMap, WorkerLayout
from paceline.kv_transfer.uneven_pull import SourceBlock, UnevenRun
from paceline.v1 import kv_pb2
from paceline.worker.block_runs import BlockRun
from paceline.worker.rank_messages import CanaryPages, RankReady

MAX_LAYERS = 4096
MAX_PAGE = 1 << 40  # of a number that a source gives


def own_layout(ready: RankReady) -> WorkerLayout:
    page = ready.groups[0]
    return WorkerLayout(
        name=page.name,
        layers=ready.layers,
        windows=tuple(group.window for group in ready.groups),
        layers_per_page=page.num_layers,
        num_planes=page.num_planes,
        head_dim=page.head_dim,
        dtype=page.dtype,
        ranks=ready.ranks,
        page_tokens=page.page_tokens,
    )


def described_layout(description: kv_pb2.DescribeResponse) -> WorkerLayout:
    """Raises IncompatiblePeer for one that cannot be read; whether it can be is LayoutMap's."""
    groups, ranks = description.groups, description.ranks
    _check("groups", len(groups), 1 <= len(groups) <= MAX_LAYERS)
    _check("layers", len(description.layers), 1 <= len(description.layers) <= MAX_LAYERS)
    _check("ranks", len(ranks), 1 <= len(ranks) <= MAX_RANKS)
    page = groups[0]
    for group in groups:
        shape = (group.num_layers, group.num_planes, group.head_dim, group.dtype, group.page_tokens)
        first = (page.num_layers, page.num_planes, page.head_dim, page.dtype, page.page_tokens)
        _check("groups", shape, shape == first)
    for rank in ranks:
        _check("ranks", rank.num_heads, rank.num_heads == page.num_heads)
        _check("first_page", rank.first_page, rank.first_page < MAX_PAGE)
    return WorkerLayout(
        name=page.name,
        layers=tuple((place.group, place.index) for place in description.layers),
        windows=tuple(group.window for group in groups),
        layers_per_page=page.num_layers,
        num_planes=page.num_planes,
        head_dim=page.head_dim,
        dtype=page.dtype,
        ranks=tuple(HeadRange(rank.first_head, rank.num_heads) for rank in ranks),
        page_tokens=page.page_tokens,
    )


def asked_runs(layouts: LayoutMap, runs: Sequence[BlockRun]) -> list[BlockRun]:
    """Blocks of the source's page groups that hold these of ours, one run a group."""
    spans: dict[int, BlockRun] = {}
    for run in runs:
        for group in layouts.source_groups(run.group):
            known = spans.get(group, BlockRun(group, run.start, run.end))
            start, end = min(known.start, run.start), max(known.end, run.end)
            spans[group] = BlockRun(group, start, end)
    return [spans[group] for group in sorted(spans)]


def found_runs(
    layouts: LayoutMap, runs: Sequence[BlockRun], pinned: kv_pb2.PinResponse
) -> list[BlockRun]:
    """What leads of each of `runs` and is pinned in all page groups that hold it."""
    answers = zip(asked_runs(layouts, runs), pinned.runs, strict=True)
    ends = {asked.group: asked.start + len(run.pages) for asked, run in answers}
    return [
        BlockRun(
            run.group,
            run.start,
            max(
                run.start,
                min(run.end, *(ends[group] for group in layouts.source_groups(run.group))),
            ),
        )
        for run in runs
    ]


def uneven_runs(
    layouts: LayoutMap,
    runs: Sequence[BlockRun],
    pinned: kv_pb2.PinResponse,
    granted: Sequence[GrantedRun],
) -> list[UnevenRun]:
    """Of what is pinned for `runs`, all of it; then the tails, one a page group of ours."""
    found = {
        asked.group: (asked.start, run.pages)
        for asked, run in zip(asked_runs(layouts, runs), pinned.runs, strict=True)
    }
    made = []
    for run in runs:
        first = run.start - granted[run.group].first_block
        blocks = {}
        for group in layouts.source_groups(run.group):
            start, pages = found[group]
            blocks[group] = [_block(ref) for ref in pages[run.start - start : run.end - start]]
        made.append(UnevenRun(run.group, granted[run.group].pages[first:][: len(run)], blocks))
    if pinned.num_tail_tokens:
        for ours, run_granted in enumerate(granted):
            tails = {g: [_block(pinned.tails[g])] for g in layouts.source_groups(ours)}
            made.append(UnevenRun(ours, run_granted.pages[-1:], tails, pinned.num_tail_tokens))
    return made


def canary_runs(
    layouts: LayoutMap, offered: Sequence[kv_pb2.PageRef], ours: CanaryPages
) -> list[UnevenRun]:
    """Raises IncompatiblePeer for a canary that is not of all page groups."""
    num_blocks = len(ours.arrivals) // len(layouts.reader.windows)
    _check("canary", len(offered), len(offered) == num_blocks * len(layouts.source.windows))
    return [
        UnevenRun(
            group,
            ours.arrivals[group * num_blocks :][:num_blocks],
            {
                theirs: [_block(ref) for ref in offered[theirs * num_blocks :][:num_blocks]]
                for theirs in layouts.source_groups(group)
            },
        )
        for group in range(len(layouts.reader.windows))
    ]


def _block(ref: kv_pb2.PageRef) -> SourceBlock:
    return SourceBlock(ref.page, ref.generation, tuple(ref.checksums), ref.block)


def _check(field: str, value: object, holds: bool) -> None:
    if not holds:
        raise IncompatiblePeer(f"{field}={value!r} of the source cannot be paired", field=field)
