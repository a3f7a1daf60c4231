"""The YAML list of tiers: what is wrong is named, with its value."""

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.kv_transfer.tiers import config
from paceline.kv_transfer.tiers.config import (
    FileTierConfig,
    HostTierConfig,
    PageShape,
    load_tiers,
    make_tiers,
)
from tests.contract.pools import SMALL

SHAPE = PageShape(SMALL, "layout")
GOOD = "- kind: host\n  capacity_mib: 64\n  eviction: arc\n"


def listed(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tiers.yaml"
    path.write_text(text)
    return path


def test_tiers_are_read_in_order(tmp_path: Path) -> None:
    second = "- {kind: host, capacity_mib: 8, name: more}\n"
    tiers = load_tiers(listed(tmp_path, GOOD + second))
    assert tiers == [HostTierConfig(64, "arc"), HostTierConfig(8, "lru", "more")]
    assert load_tiers(Path()) == []


@pytest.mark.parametrize(
    ("text", "field", "shown"),
    [
        ("- kind: tape", "tiers[0].kind", "'tape'"),
        (GOOD + "- kind: host", "tiers[1].capacity_mib", "None"),
        ("- {kind: host, capacity_mib: big}", "tiers[0].capacity_mib", "'big'"),
        ("- {kind: host, capacity_mib: 0}", "tiers[0].capacity_mib", "0"),
        ("- {kind: host, capacity_mib: 8, size: 3}", "tiers[0].size", "3"),
        ("- {kind: host, capacity_mib: 8, eviction: fifo}", "tiers[0].eviction", "'fifo'"),
        ("- {kind: host, capacity_mib: 8, name: Big One}", "tiers[0].name", "'Big One'"),
        (GOOD + GOOD, "tiers[1].name", "'host'"),
        (GOOD + "- {kind: host, capacity_mib: 8, name: device}", "tiers[1].name", "'device'"),
        ("- 3", "tiers[0]", "3"),
        ("kind: host", "tiers", "{'kind': 'host'}"),
        ("[]", "tiers", "[]"),
        ("", "tiers", "None"),
        ("- [", "tiers", "is not YAML"),
        ("- !!python/object/apply:os.getpid []", "tiers", "is not YAML"),
        ("- kind: host\n" * 9000, "tiers", "is too long"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, field: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tiers(listed(tmp_path, text))
    assert caught.value.field == field
    assert shown in caught.value.message


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.kind='object': needs the extra `s3`"):
        load_tiers(listed(tmp_path, "- {kind: object, capacity_mib: 64, bucket: pages}"))


def test_a_file_nested_without_end_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_tiers(listed(tmp_path, "[" * 3000))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers=.*cannot be read"):
        load_tiers(tmp_path / "none.yaml")


def test_a_tier_that_cannot_be_had_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.capacity_mib=1073741824: .* available"):
        make_tiers([HostTierConfig(1), HostTierConfig(1 << 30, name="huge")], SHAPE)


def test_tiers_that_fit_alone_and_not_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config, "available_bytes", lambda: config.SPARE_BYTES + (5 << 20))
    fits = [HostTierConfig(3), HostTierConfig(2, name="more"), FileTierConfig(str(tmp_path), 9)]
    for tier in make_tiers(fits, SHAPE):
        tier.close()
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.capacity_mib=3: 69 MiB"):
        make_tiers([HostTierConfig(3), HostTierConfig(3, name="more")], SHAPE)
