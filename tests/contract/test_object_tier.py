"""The object tier on a real S3-compatible server."""

import os
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from paceline.core.errors import ConfigError
from paceline.kv_transfer.tiers.config import ObjectTierConfig, PageShape
from paceline.kv_transfer.tiers.object_medium import ObjectMedium
from paceline.kv_transfer.tiers.segments import SegmentTier
from tests.contract.pools import SMALL
from tests.contract.tiers import LAYOUT, Bench, make_segment_tier, page_name
from tests.support.object_store import BUCKET, CREDENTIALS, ObjectStore, object_store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with mock.patch.dict(os.environ, CREDENTIALS), object_store(tmp_path_factory.mktemp("s3")) as s:
        yield s


def tier_on(store: ObjectStore, owner: str, num_pages: int = 12) -> SegmentTier:
    medium = ObjectMedium("tiers[0]", BUCKET, f"tests/{owner}", store.endpoint, "")
    return make_segment_tier(medium, num_pages, segment_pages=4)


def test_objects_are_found_again_by_the_next_process(store: ObjectStore) -> None:
    bench = Bench([tier_on(store, "restart")])
    bench.put(*range(10))
    assert bench.pull(*range(10)) == list(range(10))
    bench.stack.close()
    listed = store.client().list_objects_v2(Bucket=BUCKET, Prefix="tests/restart/")["Contents"]
    assert len(listed) >= 3
    store.client().put_object(Bucket=BUCKET, Key="tests/restart/notes", Body=b"not ours")
    store.client().put_object(Bucket=BUCKET, Key=f"tests/restart/{99:016x}", Body=bytes(4096))
    again = Bench([tier_on(store, "restart")])
    assert again.pull(*range(11)) == list(range(10))
    again.check()
    again.stack.close()


def test_it_is_bounded_and_deletes_what_it_gives_up(store: ObjectStore) -> None:
    bench = Bench([tier_on(store, "bound")])
    for number in range(0, 40, 4):
        bench.put(*range(number, number + 4))
    bench.stack.close()
    listed = store.client().list_objects_v2(Bucket=BUCKET, Prefix="tests/bound/")["Contents"]
    assert len(listed) <= 3
    assert bench.tiers[0].figures.num_errors == 0


def test_an_object_that_vanished_or_changed_costs_the_hit(store: ObjectStore) -> None:
    bench = Bench([tier_on(store, "spoil")])
    bench.put(*range(8))
    bench.stack.close()
    first, second = (f"tests/spoil/{number:016x}" for number in (1, 2))
    body = bytearray(store.client().get_object(Bucket=BUCKET, Key=second)["Body"].read())
    body[40] ^= 1
    again = Bench([tier_on(store, "spoil")])
    store.client().delete_object(Bucket=BUCKET, Key=first)
    store.client().put_object(Bucket=BUCKET, Key=second, Body=bytes(body))
    assert again.pull(4, 5, 6, 7) == [5, 6, 7]
    assert not again.tiers[0].holds(page_name(4))
    assert again.pull(0, 1) == []
    again.stack.close()


def test_a_store_that_hangs_holds_nobody_up(store: ObjectStore) -> None:
    bench = Bench([tier_on(store, "hang")])
    bench.put(*range(4))
    bench.tiers[0].close()
    again = Bench([tier_on(store, "hang")])
    store.pause()
    try:
        started = time.monotonic()
        assert again.pull(*range(4), timeout_s=0.3) == []
        again.put(*range(20, 24))
        assert time.monotonic() - started < 2
    finally:
        store.resume()


@pytest.mark.parametrize(
    ("change", "field"),
    [({"bucket": "no-such-bucket"}, "bucket"), ({"endpoint": "nowhere"}, "endpoint")],
)
def test_what_cannot_work_is_named(store: ObjectStore, change: dict[str, str], field: str) -> None:
    given = {"bucket": BUCKET, "endpoint": store.endpoint, **change}
    config = ObjectTierConfig(capacity_mib=8, **given)
    with pytest.raises(ConfigError, match=rf"tiers\[2\]\.{field}='{change[field]}'"):
        config.make("tiers[2]", PageShape(SMALL, LAYOUT, "decode-0"))


def test_a_worker_without_a_lasting_name_has_no_objects() -> None:
    config = ObjectTierConfig(bucket=BUCKET, capacity_mib=8)
    with pytest.raises(ConfigError, match="worker_id"):
        config.make("tiers[0]", PageShape(SMALL, LAYOUT))
