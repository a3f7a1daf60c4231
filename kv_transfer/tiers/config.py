"""The YAML list that says which tiers there are, first the one right below the pool.

- kind: host
  capacity_mib: 8192
  eviction: arc
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import yaml

from paceline.core.errors import ConfigError
from paceline.core.host_memory import available_bytes
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.tiers.base import Tier
from paceline.rpc.redis_schema import DEVICE, MAX_TIERS

if TYPE_CHECKING:
    from paceline.kv_transfer.tiers.medium import SegmentMedium

MAX_FILE_BYTES = 64 << 10
SPARE_BYTES = 64 << 20  # of the machine's memory, that no tier gets

Capacity = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_-]{1,32}$")]


@dataclass(frozen=True, slots=True)
class PageShape:
    """Of all pages that a worker keeps, and whose they are (`owner`: empty if it has no name)."""

    page: PageGroup
    layout_digest: str
    owner: str = ""


class HostTierConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="host", tag_field="kind"
):
    """Host memory."""

    capacity_mib: Capacity
    eviction: Literal["lru", "arc"] = "lru"
    name: Name = "host"

    def make(self, field: str, shape: PageShape) -> Tier:
        from paceline.kv_transfer.tiers.host import HostTier

        num_places = (self.capacity_mib << 20) // shape.page.page_bytes
        return HostTier(self.name, shape.page, num_places, self.eviction)


class FileTierConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file", tag_field="kind"
):
    """A folder on a local disk. It survives the worker."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    capacity_mib: Capacity
    segment_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16  # written at once
    name: Name = "file"

    def make(self, field: str, shape: PageShape) -> Tier:
        from paceline.kv_transfer.tiers.file_medium import FileMedium

        medium = FileMedium(f"{field}.path", Path(self.path))
        return _segment_tier(field, self, medium, shape)


class ObjectTierConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="object", tag_field="kind"
):
    """A bucket of an S3-compatible store. It survives the worker, by the worker's name."""

    bucket: Annotated[str, msgspec.Meta(min_length=3)]
    capacity_mib: Capacity
    prefix: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+(/[\w.-]+)*$")] = "paceline"
    endpoint: str = ""  # URL of the store; empty: Amazon's
    region: str = ""
    segment_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32  # an object
    name: Name = "object"

    def make(self, field: str, shape: PageShape) -> Tier:
        from paceline.kv_transfer.tiers.object_medium import ObjectMedium

        reason = "needs a worker whose name stays: set its worker_id"
        ConfigError.check(f"{field}.kind", "object", bool(shape.owner), reason)
        prefix = f"{self.prefix}/{shape.owner}"
        medium = ObjectMedium(field, self.bucket, prefix, self.endpoint, self.region)
        return _segment_tier(field, self, medium, shape)


TierConfig = HostTierConfig | FileTierConfig | ObjectTierConfig


def load_tiers(path: Path) -> list[TierConfig]:
    """Reads the list; empty if `path` is. Raises ConfigError, naming field and value."""
    if path == Path():
        return []
    try:
        text = path.read_text(errors="replace")
        ConfigError.check("tiers", str(path), len(text) <= MAX_FILE_BYTES, "is too long")
        items = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError("tiers", str(path), "is not YAML: nested too deeply") from None
    except OSError as error:
        raise ConfigError("tiers", str(path), f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        first = " ".join(str(error).split())[:120]
        raise ConfigError("tiers", str(path), f"is not YAML: {first}") from None
    is_list = isinstance(items, list) and 0 < len(items) <= MAX_TIERS
    ConfigError.check("tiers", items, is_list, f"must be a list of one to {MAX_TIERS} tiers")
    tiers = [_tier_of(f"tiers[{i}]", item) for i, item in enumerate(items)]
    for i, tier in enumerate(tiers):
        can_reach = not isinstance(tier, ObjectTierConfig) or find_spec("boto3") is not None
        reason = "needs the extra `s3`: pip install 'paceline[s3]'"
        ConfigError.check(f"tiers[{i}].kind", "object", can_reach, reason)
        reason = "is how the index calls the pool"
        ConfigError.check(f"tiers[{i}].name", tier.name, tier.name != DEVICE, reason)
        is_new = tier.name not in {other.name for other in tiers[:i]}
        ConfigError.check(f"tiers[{i}].name", tier.name, is_new, "is the name of another tier")
    return tiers


def host_bytes(configs: Sequence[TierConfig]) -> int:
    """Of memory that they come to take."""
    capacities = [c.capacity_mib for c in configs if isinstance(c, HostTierConfig)]
    return sum(capacities) << 20


def make_tiers(configs: Sequence[TierConfig], shape: PageShape) -> list[Tier]:
    """Raises ConfigError for a tier that cannot be had, or holds no page. May take seconds."""
    _check_memory(configs)
    made: list[Tier] = []
    try:
        for i, config in enumerate(configs):
            fits = (config.capacity_mib << 20) >= 2 * shape.page.page_bytes
            reason = f"holds no two pages of {shape.page.page_bytes} bytes"
            ConfigError.check(f"tiers[{i}].capacity_mib", config.capacity_mib, fits, reason)
            made.append(config.make(f"tiers[{i}]", shape))
    except BaseException:
        for tier in made:
            tier.close()
        raise
    return made


def _check_memory(configs: Sequence[TierConfig]) -> None:
    """Tiers in host memory take it as they fill: what all promise must be there now."""
    available = available_bytes()
    if available is None:
        return
    for i, config in enumerate(configs):
        fits = not host_bytes([config]) or host_bytes(configs[: i + 1]) <= available - SPARE_BYTES
        reason = f"{available >> 20} MiB of memory are available to all tiers"
        ConfigError.check(f"tiers[{i}].capacity_mib", config.capacity_mib, fits, reason)


def _segment_tier(
    field: str,
    config: FileTierConfig | ObjectTierConfig,
    medium: "SegmentMedium",
    shape: PageShape,
) -> Tier:
    """Its segments are as long as set, but no longer than an eighth of the capacity where that
    holds a page."""
    from paceline.kv_transfer.tiers.segment_format import SegmentForm
    from paceline.kv_transfer.tiers.segments import SegmentTier

    page, capacity_bytes = shape.page, config.capacity_mib << 20
    least = SegmentForm(shape.layout_digest, page.page_bytes, page.num_heads).num_bytes(1)
    most = config.segment_mib << 20
    reason = f"holds no page of {page.page_bytes} bytes"
    ConfigError.check(f"{field}.segment_mib", config.segment_mib, least <= most, reason)
    segment_bytes = max(least, min(most, capacity_bytes // 8))
    return SegmentTier(
        config.name, page, shape.layout_digest, medium, capacity_bytes, segment_bytes
    )


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
