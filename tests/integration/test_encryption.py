"""A whole deployment that encrypts, while its certificates are replaced."""

import asyncio
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from benchmarks.answer import Answer
from benchmarks.deployment import deployment, mock_model, settle, workers_total
from benchmarks.loadgen import send, send_all
from paceline.cli.cluster import Cluster
from paceline.cli.router_calls import RouterCalls
from paceline.core import metrics as names
from paceline.core.errors import PacelineError
from paceline.core.tls import PLAIN, credentials
from paceline.rpc import caller_token
from paceline.rpc.channel import connect
from paceline.rpc.status import error_of
from paceline.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from tests.support.certificates import Mount
from tests.support.end_to_end import Alone, prompt, streaming
from tests.support.waits import wait_for

pytestmark = [pytest.mark.slow]

ONCE = pytest.mark.parametrize("encrypted", ["tcp"], indirect=True, scope="module")
NOTICED_S = 2.5  # workers look once a second whether the files have changed
SAMPLING = {"max_tokens": 24, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Encrypted:
    cluster: Cluster
    mount: Mount
    model: Path
    transport: str

    def port(self, name: str) -> int:
        (text,) = [w for w in self.cluster.processes[name].command if w.startswith("--port=")]
        return int(text.removeprefix("--port="))

    def serial(self, name: str) -> int:
        """Of the certificate that a service shows to a new connection."""
        held = credentials(self.mount.config())
        assert held is not None
        with (
            socket.create_connection(("127.0.0.1", self.port(name)), timeout=5) as plain,
            held.client.wrap_socket(plain, server_hostname="paceline") as connection,
        ):
            found = connection.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def encrypted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encrypted]:
    mount = Mount(tmp_path_factory.mktemp("mount") / "tls")
    config = mount.config()
    tls = {
        "tls_ca": config.ca,
        "tls_cert": config.cert,
        "tls_key": config.key,
        "tls_encryption": "required",
    }
    worker = {"transports": request.param, "num_threads": 1, "pool_mib": 16, **tls}
    router = {"split_min_tokens": 0, **tls}
    with (
        mock_model(step_s=0.005) as model,
        deployment(model, router=router, gateway=tls, worker=worker) as cluster,
    ):
        yield Encrypted(cluster, mount, model, request.param)


def test_split_requests_get_the_tokens_of_one_worker(encrypted: Encrypted) -> None:
    prompts = [prompt(n, salt=n) for n in (1, 16, 100, 333)]
    calls = [streaming(encrypted.model, p, **SAMPLING) for p in prompts]
    answers = asyncio.run(send_all(encrypted.cluster.base_url, calls, len(calls)))
    alone = Alone(encrypted.model)
    for token_ids, answer in zip(prompts, answers, strict=True):
        assert answer.is_complete, answer.error
        assert [answer.token_ids()] == alone.answer(token_ids, **SAMPLING)
    settle(encrypted.cluster)
    pulled = workers_total(
        encrypted.cluster, names.TRANSFER_BYTES, "decode", transport=encrypted.transport
    )
    assert pulled > 0


@ONCE
async def test_roles_are_changed_over_it_and_not_around_it(encrypted: Encrypted) -> None:
    """From the operator to the router, and from there to the worker."""
    cluster = encrypted.cluster
    request = worker_pb2.ChangeRoleRequest(worker_id="prefill-0", reason="command")
    plain = RouterCalls([cluster.router_endpoint], cluster.secret, PLAIN)
    with pytest.raises(PacelineError):
        await plain.workers()
    calls = RouterCalls([cluster.router_endpoint], cluster.secret, encrypted.mount.config())
    for role in (worker_pb2.ROLE_BOTH, worker_pb2.ROLE_PREFILL):
        request.role = role
        states = [state async for state in calls.change_role(request)]
        assert (states[-1].role, states[-1].num_leaving) == (role, 0)


@ONCE
async def test_tickets_are_checked_all_the_same(encrypted: Encrypted) -> None:
    endpoint = f"127.0.0.1:{encrypted.port('prefill-0')}"
    metadata = caller_token.metadata(encrypted.cluster.secret.encode())
    async with connect(endpoint, encrypted.mount.config()) as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Progress(kv_pb2.ProgressRequest(), timeout=5, metadata=metadata).read()
    assert str(error_of(caught.value).field).startswith("ticket")


async def sent_until(over: asyncio.Event, encrypted: Encrypted) -> list[Answer]:
    """One request after the other."""
    answers: list[Answer] = []
    while not over.is_set():
        call = streaming(encrypted.model, prompt(60, salt=50 + len(answers)), **SAMPLING)
        answers.append(await send(encrypted.cluster.base_url, call))
    return answers


@ONCE
async def test_no_request_fails_while_certificates_and_their_authority_are_replaced(
    encrypted: Encrypted,
) -> None:
    """At the end nothing of the beginning is good any more."""
    mount = encrypted.mount
    old, new = mount.authority, trustme.CA()
    over = asyncio.Event()
    load = [asyncio.create_task(sent_until(over, encrypted)) for _ in range(3)]
    serials = set()
    for authority, trusted in ((old, [new]), (new, [old]), (new, [])):
        mount.authority, mount.trusted = authority, trusted
        mount.issue()
        await asyncio.sleep(NOTICED_S)
        serials.add(await asyncio.to_thread(encrypted.serial, "prefill-0"))
        assert mount.serial() in serials
    over.set()
    answers = [answer for sent in await asyncio.gather(*load) for answer in sent]
    assert len(serials) == 3 and len(answers) > 10
    assert not [answer.error for answer in answers if not answer.is_complete]


@ONCE
def test_a_worker_that_starts_after_that_is_met_by_new_connections(encrypted: Encrypted) -> None:
    encrypted.mount.issue()
    encrypted.cluster.kill("prefill-0")
    wait_for(lambda: served_apart(encrypted), 90)
    assert encrypted.serial("prefill-0") == encrypted.mount.serial()


def served_apart(encrypted: Encrypted) -> bool:
    """A request whose prompt the new prefill worker has computed."""
    bytes_of = (encrypted.cluster, names.TRANSFER_BYTES, "decode")
    before = workers_total(*bytes_of)
    token_ids = prompt(40, salt=round(time.monotonic() * 1000) % 10**6)
    call = streaming(encrypted.model, token_ids, **SAMPLING)
    answer = asyncio.run(send(encrypted.cluster.base_url, call))
    return answer.is_complete and workers_total(*bytes_of) > before
