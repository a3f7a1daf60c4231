"""Answers of a source with whatever numbers: its reader computes instead, and goes on.

The tokens of names are not in question here: a source of the deployment that lies about what a page
holds, and sums it up accordingly, is believed.
"""

import random
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline.rpc import tickets
from tests.support.end_to_end import Alone
from tests.support.fake_router import Attachment, make_hint, make_request
from tests.support.kv_proxy import KvProxy, Seam
from tests.support.mock_model import write_mock_model
from tests.support.waits import wait_beside
from tests.support.worker_pair import FAST, is_free
from tests.support.workers import SECRET, WorkerProcess, start_worker, until_stopped

NUM_PULLS = 60
MAX_GROWTH_BYTES = 64 << 20
NUMBERS = (0, 1, 2, 15, 16, 17, 255, 1024, 4096, 2**31, 2**32 - 1)
LARGE = (*NUMBERS, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
KEPT = {"worker_id", "incarnation", "lease_id"}  # else it is another source, or lease

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Mutant(Seam):
    """Changes one field of the next answer to `method`, whichever it is."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.method = ""
        self.incarnation = ""  # that the source claims to be; empty: its own
        self.changed = ""

    async def answered(self, method: str, answer: Any) -> None:
        if method == "Describe" and self.incarnation:
            answer.incarnation = self.incarnation
        if method == self.method:
            self.method, self.changed = "", f"{method}: {self.change(answer)}"

    def change(self, message: Message) -> str:
        fields = [f for f in message.DESCRIPTOR.fields if f.name not in KEPT]
        field = self.chance.choice(fields)
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value[self.chance.choice(["weights", "x"])] = "é" * 999
        elif not field.is_repeated:
            setattr(message, field.name, self.scalar(field, value))
        elif len(value) and field.message_type is not None and self.chance.random() < 0.6:
            return f"{field.name} {self.change(self.chance.choice(value))}"
        elif len(value) and self.chance.random() < 0.7:
            copies = self.chance.choice([1, 1, 2000])
            value.extend([value[-1]] * copies)
        else:
            message.ClearField(field.name)
        return field.name

    def scalar(self, field: FieldDescriptor, old: Any) -> object:
        if isinstance(old, str):
            return self.chance.choice(["", "tcp", "shm", "float32", "\0", "é" * 999])
        if isinstance(old, bytes):
            return self.chance.choice([b"", bytes(100), self.chance.randbytes(64), old[:-1]])
        is_large = field.cpp_type == FieldDescriptor.CPPTYPE_UINT64
        return self.chance.choice(LARGE if is_large else NUMBERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("answers") / "model", token_s=0.001)


@pytest.fixture(params=[1, 2], ids=["alike", "uneven"])
def workers(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path
) -> Iterator[dict[str, WorkerProcess]]:
    """A holder, and a reader whose pages are laid out as the holder's, or over two ranks."""
    ranks = {"num_ranks": request.param} if request.param > 1 else {}
    reader = write_mock_model(tmp_path / "reader", token_s=0.001, **ranks)
    started = {
        "reader": start_worker("decode", reader, **FAST),
        "holder": start_worker("prefill", model, **FAST),
    }
    with ExitStack() as stack:
        yield stack.enter_context(until_stopped(started))


async def test_whatever_a_source_answers_costs_a_miss_at_most(
    workers: dict[str, WorkerProcess], model: Path
) -> None:
    alone = Alone(write_mock_model(model.parent / "fast"))
    chance = random.Random(4)
    reader, holder = workers["reader"], workers["holder"]
    processes = [psutil.Process(pid) for pid in (reader.pid, *reader.rank_pids())]
    mutant = Mutant(chance)
    proxy = KvProxy(holder.endpoint, mutant)
    await proxy.start()
    async with Attachment(reader.endpoint) as sink, Attachment(holder.endpoint) as source:
        memory = 0
        for i in range(NUM_PULLS):
            tokens = [chance.randrange(256) for _ in range(160)]
            first = make_request(source.info, tokens, max_tokens=1, ignore_eos=True)
            await source.run(first).until_ended()
            request = make_request(sink.info, tokens, max_tokens=4, ignore_eos=True)
            hint = make_hint(request, source, sink)
            hint.source_endpoint = f"127.0.0.1:{proxy.port}"
            mutant.method = chance.choice(["Describe", "Pin"])
            mutant.incarnation = secrets.token_hex(8) if mutant.method == "Describe" else ""
            if mutant.incarnation:  # each is described once
                hint.ticket.source_incarnation = mutant.incarnation
                hint.ticket.CopyFrom(tickets.sign(hint.ticket, SECRET.encode()))
            log = await sink.run(request, [hint]).until_ended()
            assert log.error is None, mutant.changed
            expected = alone.answer(tokens, max_tokens=4, temperature=0, ignore_eos=True)
            assert [log.output()] == expected, mutant.changed
            if i == NUM_PULLS // 3:
                memory = sum(process.memory_info().rss for process in processes)
        assert sum(p.memory_info().rss for p in processes) - memory < MAX_GROWTH_BYTES
    assert reader.metric("paceline_worker_incarnations_total") == 1
    await wait_beside(lambda: is_free(reader) and is_free(holder), 10)
    await proxy.close()
