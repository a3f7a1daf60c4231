"""Who is asking: the key file's tenants, their keys' digests, and the salts of their KV.

    [tenants.acme]                       # name: 1 to 64 of A-Z a-z 0-9 . _ -
    keys = ["9f86d081884c7d65…"]         # SHA-256 of each key, hex
    requests_per_minute = 600            # these three may be left out: no limit
    tokens_per_minute = 200000
    max_running_requests = 32
    weight = 2.0                         # of its share where requests queue; 1 if left out
    best_priority = -5                   # that its requests may have; 0 if left out

Keys are random, so one round of SHA-256 keeps them; a key that is presented is looked up by a HMAC
of its digest under a secret of this process, so the time that a look-up takes says nothing.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.core.errors import ConfigError, InvalidApiKey, InvalidRequest
from paceline.core.keys import narrowed_salt, tenant_digest, tenant_salt
from paceline.gateway.jobs import KvOwner
from paceline.gateway.metrics import now_s
from paceline.gateway.rate_limits import Meter, TenantLimits
from paceline.gateway.usage import OwnUsages, Usages

DEFAULT_TENANT = "default"  # of everybody, without a key file
MAX_FILE_BYTES = 1 << 20
MAX_CACHE_SALT_CHARS = 256
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1  # the smaller runs first
_MAX_KEY_BYTES = 512
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LOOKUP_SECRET = secrets.token_bytes(32)

Limit = Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[str]
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    max_running_requests: Limit = None
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    best_priority: Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0

    def limits(self) -> TenantLimits:
        return TenantLimits(
            self.requests_per_minute, self.tokens_per_minute, self.max_running_requests
        )


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: dict[str, _Entry]


@dataclass(frozen=True, slots=True)
class Tenant:
    """What is known of a caller."""

    name: str
    salt: bytes  # of its KV's names
    meter: Meter
    digest: str  # which stands for it in what operators see
    weight: float = 1.0  # of its share where requests queue
    best_priority: int = MIN_PRIORITY  # that its requests may have

    def priority_of(self, wished: int | None) -> int:
        """Of a request; what says nothing (or 0, the default) gets the best that it may have up to
        that. Raises InvalidRequest for a better one: whoever is served before all others could
        keep them from being served at all."""
        value = wished or 0
        fits = MIN_PRIORITY <= value <= MAX_PRIORITY
        InvalidRequest.check("priority", value, fits, "must fit in 32 bits, signed")
        if not value:
            return max(0, self.best_priority)
        reason = f"must be at least {self.best_priority}, the best that your API key may ask for"
        InvalidRequest.check("priority", value, value >= self.best_priority, reason)
        return value

    def owner(self, cache_salt: str | None) -> KvOwner:
        """Of a request's KV, shared only with requests of the same `cache_salt`. Whatever that is,
        the names stay the tenant's own. Raises InvalidRequest."""
        fits = cache_salt is None or 0 < len(cache_salt) <= MAX_CACHE_SALT_CHARS
        reason = f"must have between 1 and {MAX_CACHE_SALT_CHARS} characters"
        InvalidRequest.check("cache_salt", cache_salt, fits, reason)
        return KvOwner(self.name, cache_salt, narrowed_salt(self.salt, cache_salt))


class TenantTable:
    """One state of the key file. Its tenants' meters may be in use already: their new limits wait
    until it is put in force, when all of the file is known to be right."""

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        by_key: Mapping[bytes, Tenant],
        changes: Sequence[tuple[Meter, TenantLimits]],
    ) -> None:
        self.tenants = tenants
        self._by_key = by_key
        self._changes = changes

    def put_in_force(self, now_s: float) -> None:
        """Where requests are metered: on the event loop."""
        for meter, limits in self._changes:
            meter.change_limits(limits, now_s)

    def of_key(self, key: bytes) -> Tenant:
        """Raises InvalidApiKey."""
        digest = hashlib.sha256(key[:_MAX_KEY_BYTES]).digest()
        tenant = self._by_key.get(_lookup_name(digest)) if len(key) <= _MAX_KEY_BYTES else None
        if tenant is None:
            raise InvalidApiKey("The API key is not valid.")
        return tenant


def default_tenant(secret: str) -> Tenant:
    return _tenant(DEFAULT_TENANT, secret, Meter(TenantLimits(), now_s()))


def read_tenants(
    path: Path, secret: str, before: TenantTable | None = None, usages: Usages | None = None
) -> TenantTable:
    """The file's table; meters go on from those of `before`, unchanged until it is put in force,
    new ones from what `usages` tell. Raises ConfigError, whose cause is an OSError when the file
    could not be read."""
    tenants: dict[str, Tenant] = {}
    by_key: dict[bytes, Tenant] = {}
    changes: list[tuple[Meter, TenantLimits]] = []
    usages = usages or OwnUsages()
    for name, entry in _parsed(path).tenants.items():
        if not _NAME.fullmatch(name):
            raise _wrong(path, f"tenant {name[:64]!r}: 1 to 64 letters, digits, dots, _ and -")
        limits = entry.limits()
        known = before.tenants.get(name) if before is not None else None
        meter = known.meter if known is not None else Meter(limits, now_s(), usages.of(name))
        if limits != meter.limits:
            changes.append((meter, limits))
        tenants[name] = _tenant(name, secret, meter, entry.weight, entry.best_priority)
        for number, digest in enumerate(entry.keys):
            if not _DIGEST.fullmatch(digest):
                raise _wrong(path, f"tenants.{name}.keys[{number}] is no SHA-256 in lower-case hex")
            if by_key.setdefault(_lookup_name(bytes.fromhex(digest)), tenants[name]).name != name:
                raise _wrong(path, f"tenants.{name}.keys[{number}] is another tenant's, too")
    if not by_key:
        raise _wrong(path, "it holds no key: nobody could come in")
    return TenantTable(tenants, by_key, changes)


def _tenant(
    name: str,
    secret: str,
    meter: Meter,
    weight: float = 1.0,
    best_priority: int = MIN_PRIORITY,
) -> Tenant:
    key = secret.encode()
    salt, digest = tenant_salt(key, name), tenant_digest(key, name)
    return Tenant(name, salt, meter, digest, weight, best_priority)


def _parsed(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise _wrong(path, f"larger than {MAX_FILE_BYTES} bytes")
        return msgspec.convert(tomllib.loads(raw.decode()), _File)
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    except RecursionError:
        raise _wrong(path, "nested too deeply") from None
    except (ValueError, msgspec.ValidationError) as error:  # no UTF-8, no TOML, a huge number
        raise _wrong(path, str(error)) from None


def _wrong(path: Path, reason: str) -> ConfigError:
    return ConfigError("api_keys", path.name, reason)


def _lookup_name(digest: bytes) -> bytes:
    return hmac.digest(_LOOKUP_SECRET, digest, "sha256")
