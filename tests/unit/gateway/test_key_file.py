"""The file of tenants: what is wrong with it is said. What a tenant may use, by the clock."""

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, RateLimited
from paceline.gateway.metrics import now_s
from paceline.gateway.rate_limits import Bucket, Meter, TenantLimits
from paceline.gateway.tenants import read_tenants
from tests.support.fake_router_service import SECRET
from tests.support.key_file import entry

ACME = "sk-acme"


def test_a_bucket_fills_evenly_and_a_prompt_longer_than_it_waits_for_a_full_one() -> None:
    bucket = Bucket(60, now_s=0)
    assert bucket.wait_s(1000, now_s=0) == 0
    bucket.take(1000, now_s=0)
    assert bucket.wait_s(1, now_s=0) == pytest.approx(941)
    assert bucket.wait_s(1000, now_s=990) == pytest.approx(10)
    assert bucket.wait_s(1000, now_s=1000) == 0
    assert bucket.level == pytest.approx(60)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[tenants", "api_keys='keys.toml'"),
        ("", "tenants"),
        ("[tenants]", "no key"),
        (entry("acme", []), "no key"),
        (entry("acme", [ACME]) + "limit = 1", "limit"),
        (entry("acme", [ACME], requests_per_minute=0), "requests_per_minute"),
        ('[tenants.acme]\nkeys = ["sk-plain"]', r"acme.keys\[0\] is no SHA-256"),
        (entry('"a b"', [ACME]), "tenant 'a b'"),
        (entry("acme", [ACME]) + entry("other", [ACME]), "another tenant's, too"),
        (b"\xff", "utf-8"),
        (b"#" * (5 << 20), "larger than"),
        (entry("acme", [ACME]) + "tokens_per_minute = " + "9" * 5000, "digits"),
        (entry("acme", [ACME]) + "tokens_per_minute = " + "9" * 20, "tokens_per_minute"),
        (entry("acme", [ACME]) + "limit = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_wrong_file_names_what_is_wrong(tmp_path: Path, text: str | bytes, reason: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=reason) as caught:
        read_tenants(path, SECRET)
    assert "sk-plain" not in str(caught.value)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_tenants(tmp_path / "none.toml", SECRET)


def test_limits_change_when_all_of_the_file_is_right_and_put_in_force(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("acme", [ACME], requests_per_minute=600))
    table = read_tenants(path, SECRET)
    meter = table.tenants["acme"].meter
    path.write_text(entry("acme", [ACME], requests_per_minute=1) + entry("b", [ACME]))
    with pytest.raises(ConfigError):
        read_tenants(path, SECRET, table)
    path.write_text(entry("acme", [ACME], requests_per_minute=2))
    changed = read_tenants(path, SECRET, table)
    assert changed.tenants["acme"].meter is meter and meter.limits.requests_per_minute == 600
    changed.put_in_force(now_s())
    assert meter.limits.requests_per_minute == 2


def test_a_change_of_limits_forgets_neither_what_was_used_nor_what_has_come_since() -> None:
    meter = Meter(TenantLimits(tokens_per_minute=60), now_s=0)
    meter.take_output(100, now_s=0)
    meter.change_limits(TenantLimits(tokens_per_minute=600), now_s=30)
    with pytest.raises(RateLimited) as caught:
        meter.take_prompt(1, now_s=30)
    assert caught.value.retry_after_s == pytest.approx(1.1)  # 60 - 100 + 30, at 10 a second
    meter.take_prompt(1, now_s=31.2)
