"""Tiers outlive a rank whose pages are like those of the one before, and no other."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import PageGroup
from paceline.worker.config import WorkerConfig
from paceline.worker.redis_record import RedisRecord
from paceline.worker.worker_tiers import WorkerTiers
from tests.contract.pools import SMALL, make_pool
from tests.contract.tiers import Bench, page_name

LARGE = PageGroup("full", SMALL.num_layers, 2 * SMALL.num_heads, SMALL.head_dim)


def ready(page: PageGroup, layout_digest: str) -> Any:
    return SimpleNamespace(groups=[page], layout_digest=layout_digest, ranks=[0])


async def test_pages_of_several_ranks_are_refused(tmp_path: Path) -> None:
    listed = tmp_path / "tiers.yaml"
    listed.write_text("- {kind: host, capacity_mib: 1}")
    config = WorkerConfig(model=str(tmp_path), secret="s" * 16, tiers=listed)
    made = WorkerTiers(config, RedisRecord("", 1.0), CollectorRegistry())
    several = ready(SMALL, "small")
    several.ranks = [0, 1]
    with pytest.raises(ConfigError) as refused:
        await made.open(several)
    assert refused.value.field == "tiers"


@pytest.fixture
async def tiers(tmp_path: Path) -> AsyncIterator[WorkerTiers]:
    listed = tmp_path / "tiers.yaml"
    listed.write_text("- {kind: host, capacity_mib: 1}")
    config = WorkerConfig(model=str(tmp_path), secret="s" * 16, tiers=listed)
    made = WorkerTiers(config, RedisRecord("", 1.0), CollectorRegistry())
    await made.open(ready(SMALL, "small"))
    yield made
    await made.close()


def put_one(tiers: WorkerTiers, page: PageGroup = SMALL) -> None:
    assert tiers.stack is not None
    batch = Bench([], page=page, source=make_pool(page, 64, 1)).batch([1])
    assert tiers.stack.put(batch).tolist() == []


async def test_they_outlive_a_rank_of_the_same_form(tiers: WorkerTiers) -> None:
    put_one(tiers)
    await tiers.reopen(ready(SMALL, "small"))
    assert tiers.stack is not None and tiers.stack.holds(page_name(1))


@pytest.mark.parametrize(("page", "digest"), [(SMALL, "other"), (LARGE, "large")])
async def test_they_are_made_anew_for_another(
    tiers: WorkerTiers, page: PageGroup, digest: str
) -> None:
    put_one(tiers)
    await tiers.reopen(ready(page, digest))
    assert tiers.stack is not None and not tiers.stack.holds(page_name(1))
    put_one(tiers, page)
    assert tiers.stack.holds(page_name(1))


async def test_a_rank_whose_pages_do_not_fit_serves_without(tiers: WorkerTiers) -> None:
    huge = PageGroup("full", 64, 64, 128)
    assert 2 * huge.page_bytes > 1 << 20
    await tiers.reopen(ready(huge, "huge"))
    assert tiers.stack is None
    await tiers.reopen(ready(SMALL, "small"))
    assert tiers.stack is not None
