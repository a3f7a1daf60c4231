"""The YAML list that says which tiers there are, first the one right below the pool.

- kind: host
  capacity_mib: 8192
  eviction: arc
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from paceline.core.errors import ConfigError
from paceline.core.host_memory import available_bytes
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.tiers.base import Tier

MAX_FILE_BYTES = 64 << 10
MAX_TIERS = 8
SPARE_BYTES = 64 << 20  # of the machine's memory, that no tier gets

Capacity = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_-]{1,32}$")]


class HostTierConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="host", tag_field="kind"
):
    """Host memory."""

    capacity_mib: Capacity
    eviction: Literal["lru", "arc"] = "lru"
    name: Name = "host"

    def make(self, field: str, page: PageGroup, layout_digest: str) -> Tier:
        from paceline.kv_transfer.tiers.host import HostTier

        available = available_bytes()
        fits = available is None or (self.capacity_mib << 20) <= available - SPARE_BYTES
        reason = f"{(available or 0) >> 20} MiB of memory are available"
        ConfigError.check(f"{field}.capacity_mib", self.capacity_mib, fits, reason)
        num_places = (self.capacity_mib << 20) // page.page_bytes
        return HostTier(self.name, page, num_places, self.eviction)


class FileTierConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file", tag_field="kind"
):
    """A folder on a local disk. It survives the worker."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    capacity_mib: Capacity
    segment_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16  # written at once
    name: Name = "file"

    def make(self, field: str, page: PageGroup, layout_digest: str) -> Tier:
        from paceline.kv_transfer.tiers.file_medium import FileMedium
        from paceline.kv_transfer.tiers.segments import SegmentTier

        capacity_bytes = self.capacity_mib << 20
        segment_bytes = _segment_bytes(field, self.segment_mib, capacity_bytes, page, layout_digest)
        medium = FileMedium(f"{field}.path", Path(self.path))
        return SegmentTier(self.name, page, layout_digest, medium, capacity_bytes, segment_bytes)


TierConfig = HostTierConfig | FileTierConfig


def load_tiers(path: Path) -> list[TierConfig]:
    """Reads the list; empty if `path` is. Raises ConfigError, naming field and value."""
    if path == Path():
        return []
    try:
        text = path.read_text(errors="replace")
        ConfigError.check("tiers", str(path), len(text) <= MAX_FILE_BYTES, "is too long")
        items = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError("tiers", str(path), f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        first = " ".join(str(error).split())[:120]
        raise ConfigError("tiers", str(path), f"is not YAML: {first}") from None
    is_list = isinstance(items, list) and 0 < len(items) <= MAX_TIERS
    ConfigError.check("tiers", items, is_list, f"must be a list of one to {MAX_TIERS} tiers")
    tiers = [_tier_of(f"tiers[{i}]", item) for i, item in enumerate(items)]
    for i, tier in enumerate(tiers):
        is_new = tier.name not in {other.name for other in tiers[:i]}
        ConfigError.check(f"tiers[{i}].name", tier.name, is_new, "is the name of another tier")
    return tiers


def make_tiers(configs: Sequence[TierConfig], page: PageGroup, layout_digest: str) -> list[Tier]:
    """Raises ConfigError for a tier that cannot be had, or holds no page. May take seconds."""
    made: list[Tier] = []
    try:
        for i, config in enumerate(configs):
            fits = (config.capacity_mib << 20) >= 2 * page.page_bytes
            reason = f"holds no two pages of {page.page_bytes} bytes"
            ConfigError.check(f"tiers[{i}].capacity_mib", config.capacity_mib, fits, reason)
            made.append(config.make(f"tiers[{i}]", page, layout_digest))
    except BaseException:
        for tier in made:
            tier.close()
        raise
    return made


def _segment_bytes(
    field: str, segment_mib: int, capacity_bytes: int, page: PageGroup, layout_digest: str
) -> int:
    """As it is set, but no more than an eighth of the capacity where that holds a page."""
    from paceline.kv_transfer.tiers.segment_format import SegmentForm

    least = SegmentForm(layout_digest, page.page_bytes, page.num_heads).num_bytes(1)
    reason = f"holds no page of {page.page_bytes} bytes"
    ConfigError.check(f"{field}.segment_mib", segment_mib, least <= segment_mib << 20, reason)
    return max(least, min(segment_mib << 20, capacity_bytes // 8))


def _tier_of(field: str, item: Any) -> TierConfig:
    try:
        tier: TierConfig = msgspec.convert(item, TierConfig)
        return tier
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        named = re.search(r"(?:field|required field) `(\w+)`", reason)
        parts = re.findall(r"\w+", path) + ([named[1]] if named else [])
        value = item
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        raise ConfigError(".".join([field, *parts]), value, reason) from None
