"""A gateway under minutes of requests that nobody would send: no 5xx, no crash, memory flat.

PACELINE_FUZZ_S sets how long (60); PACELINE_FUZZ_SEED repeats a run, as far as timing lets it.
"""

import asyncio
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from paceline.core.metrics import GATEWAY_RUNNING
from tests.support.fake_router_service import bytes_reply
from tests.support.fuzz import connection
from tests.support.gateway_client import raw_request, request_bytes
from tests.support.gateway_process import GatewayProcess, gateway_process

FUZZ_S = float(os.environ.get("PACELINE_FUZZ_S", "60"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "6"))
AT_ONCE = 16
READ_S = 0.5  # of the gateway, for what never comes
WAITS_S = (0, 0.03, 0.03, 0.03, 0.03, 0.03, 0.1, 3 * READ_S)
WARM_SHARE = 0.3  # of the time: what is allocated once is there after it
MAX_GROWTH_MIB = 8
IDLE = f"\n{GATEWAY_RUNNING} 0.0\n".encode()
FAILED = re.compile(rb'"code":"internal"|Internal Server Error')
STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 60)
async def test_no_request_whatsoever_makes_the_gateway_fail(tmp_path: Path) -> None:
    arguments = ("--read-timeout-s", str(READ_S), "--max-body-bytes", str(1 << 16))
    async with gateway_process(tmp_path, *arguments) as gateway:
        await gateway.is_ready()
        gateway.router.reply = lambda request: bytes_reply(b"Hello")
        seen: Counter[int] = Counter()
        resident_mib = []
        for share in (WARM_SHARE, 1 - WARM_SHARE):
            ends = time.monotonic() + share * FUZZ_S
            streams = [random.Random(f"{SEED} {share} {i}") for i in range(AT_ONCE)]
            await asyncio.gather(*(fuzz(gateway, chance, ends, seen) for chance in streams))
            resident_mib.append(await at_rest(gateway))
        print(f"answers: {sorted(seen.items())}, resident MiB: {resident_mib}")
        assert {200, 400, 404, 405, 408} <= set(seen)
        assert resident_mib[1] - resident_mib[0] < MAX_GROWTH_MIB
        assert not [line for line in gateway.log if "Traceback" in line or "exception" in line]


async def fuzz(
    gateway: GatewayProcess, chance: random.Random, ends: float, seen: Counter[int]
) -> None:
    """One connection after the other."""
    while time.monotonic() < ends:
        gateway.router.submissions.clear()
        pieces = connection(chance)
        wait_s = chance.choice(WAITS_S)
        received = await exchange(gateway.port, pieces, wait_s)
        assert gateway.process.returncode is None, gateway.log
        statuses = [int(found) for found in STATUS.findall(received)]
        assert not FAILED.search(received) and not any(s >= 500 for s in statuses), (
            pieces,
            received[-2000:],
        )
        seen.update(statuses)


async def exchange(port: int, pieces: list[bytes], wait_s: float) -> bytes:
    """All that comes until nothing more has for so long. 0: leaves at once, without reading."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        while wait_s and (part := await asyncio.wait_for(reader.read(1 << 16), wait_s)):
            received += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return bytes(received)


async def at_rest(gateway: GatewayProcess) -> float:
    """Its resident MiB when nothing runs any more and the next request was served."""
    await asyncio.sleep(2 * READ_S)
    body = b'{"model": "mock", "prompt": "Hi"}'
    status, _, answer = await raw_request(gateway.port, request_bytes("/v1/completions", body))
    assert status == 200 and b"Hello" in answer
    status, _, page = await raw_request(gateway.port, request_bytes("/metrics", b"", method="GET"))
    assert status == 200 and IDLE in page, page
    return round(psutil.Process(gateway.process.pid).memory_info().rss / 2**20, 1)
