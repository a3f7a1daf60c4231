"""API keys: who is let in, whose KV it is, what a tenant may use, and the file that says so."""

import asyncio
import errno
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client import generate_latest
from starlette.routing import Route

from paceline.core.keys import root_key, tenant_salt
from paceline.gateway import authentication
from paceline.gateway.app import make_app
from paceline.gateway.guard import PUBLIC
from paceline.rpc.channel import connect
from paceline.v1.generate_pb2 import GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.fake_router_service import SECRET, Reply, bytes_reply
from tests.support.gateway_deployment import Deployment, running
from tests.support.key_file import bearer, entry, write
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ACME, OTHER = "sk-acme", "sk-other"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def guarded(model_dir: Path, tmp_path_factory: Any) -> AsyncIterator[Deployment]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(path, entry("acme", [ACME, "sk-acme-2"]), entry("other", [OTHER]))
    async with running(model_dir, api_keys=path) as deployment:
        deployment.http.headers.pop("authorization", None)
        yield deployment


async def complete(own: Deployment, key: str, **fields: Any) -> Any:
    body = {"model": "mock", "prompt": "x" * 40, "max_tokens": 5, **fields}
    return await own.http.post("/v1/completions", json=body, headers=bearer(key))


async def test_every_route_but_the_public_ones_needs_a_key(guarded: Deployment) -> None:
    routes = make_app(guarded.gateway.serving).routes
    paths = {route.path for route in routes if isinstance(route, Route)}
    assert {"/v1/chat/completions", "/tokenize", "/v1/models"} <= paths > PUBLIC
    for path in {*paths, "/", "/v1/none", "/docs", "/livez/", "//livez", "/v1/models/mock"}:
        for method in ("GET", "POST", "OPTIONS"):
            answer = await guarded.http.request(method, path)
            if path in PUBLIC:
                assert answer.status_code in (200, 405)
                continue
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
    assert not guarded.router.submissions


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer sk-acm",
        "Bearer sk-acme-22",
        "Basic sk-acme",
        "sk-acme",
        "Bearer " + "k" * 60_000,
        "Bearer " + hashlib.sha256(ACME.encode()).hexdigest(),
    ],
)
async def test_a_wrong_key_is_refused(guarded: Deployment, header: str) -> None:
    answer = await guarded.http.get("/v1/models", headers={"authorization": header})
    assert answer.status_code == 401 and "sk-acm" not in answer.text


async def test_a_refused_body_leaves_its_connection_usable(guarded: Deployment) -> None:
    body = b"x" * (4 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    again = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ACME}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", guarded.port)
    writer.write(head + body + again)
    answers = await asyncio.wait_for(reader.readuntil(b'"object":"list"'), 5)
    assert answers.startswith(b"HTTP/1.1 401 ") and b"HTTP/1.1 200 OK" in answers
    writer.close()


async def test_each_key_of_a_tenant_opens(guarded: Deployment) -> None:
    for header in (bearer(ACME), bearer("sk-acme-2"), {"authorization": f"bearer  {OTHER}"}):
        assert (await guarded.http.get("/v1/models", headers=header)).status_code == 200
    client = guarded.openai.with_options(api_key=ACME)
    assert [model.id for model in (await client.models.list()).data] == ["mock"]


async def test_kv_is_named_by_tenant_and_a_cache_salt_only_narrows_it(guarded: Deployment) -> None:
    roots: dict[tuple[str, str | None], bytes] = {}
    for key in (ACME, OTHER):
        for salt in (None, "a", "b"):
            fields = {} if salt is None else {"cache_salt": salt}
            assert (await complete(guarded, key, **fields)).status_code == 200
            request = guarded.router.submissions[-1].request
            assert request.tenant == {ACME: "acme", OTHER: "other"}[key]
            roots[key, salt] = request.root_key
    assert len(set(roots.values())) == 6
    assert roots[ACME, None] == root_key("ab" * 32, tenant_salt(SECRET.encode(), "acme"))
    await complete(guarded, "sk-acme-2", cache_salt="a")
    assert guarded.router.submissions[-1].request.root_key == roots[ACME, "a"]
    # another tenant's salt, given as one's own, leads nowhere
    others = tenant_salt(SECRET.encode(), "other").hex()
    await complete(guarded, ACME, cache_salt=others)
    assert guarded.router.submissions[-1].request.root_key not in roots.values()
    for wrong in ("", "s" * 257):
        answer = await complete(guarded, ACME, cache_salt=wrong)
        assert answer.json()["error"]["param"] == "cache_salt"


async def test_a_tenants_weight_travels_with_its_requests(
    guarded: Deployment, tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.toml", entry("acme", [ACME], weight=2.5), entry("o", [OTHER]))
    async with running(guarded.model_dir, api_keys=keys) as own:
        for key, weight in ((ACME, 2.5), (OTHER, 1.0)):
            await complete(own, key)
            await own.http.post(
                "/v1/embeddings", json={"model": "mock", "input": "a"}, headers=bearer(key)
            )
            for made in own.router.submissions[-2:]:
                assert made.request.tenant_weight == weight


async def test_no_tenant_is_served_before_others_unless_its_entry_says_so(
    guarded: Deployment, tmp_path: Path
) -> None:
    keys = write(
        tmp_path / "keys.toml",
        entry("batch", ["sk-batch"], best_priority=7),
        entry("usual", [OTHER]),
        entry("urgent", [ACME], best_priority=-5),
    )
    granted = {
        "sk-batch": {None: 7, 0: 7, 7: 7, 8: 8, 6: None, -1: None},
        OTHER: {None: 0, 0: 0, 3: 3, -1: None, -(2**31): None},
        ACME: {None: 0, -5: -5, 1: 1, -6: None},
    }
    async with running(guarded.model_dir, api_keys=keys) as own:
        for key, cases in granted.items():
            for wished, priority in cases.items():
                fields = {} if wished is None else {"priority": wished}
                body = {"model": "mock", "input": "a"} | fields
                embedded = await own.http.post("/v1/embeddings", json=body, headers=bearer(key))
                for answer in (embedded, await complete(own, key, **fields)):
                    made = own.router.submissions[-1].request
                    if priority is None:
                        error = answer.json()["error"]
                        assert (answer.status_code, error["param"]) == (400, "priority"), error
                        assert str(wished) in error["message"] and "at least" in error["message"]
                    else:
                        assert answer.status_code == 200
                        assert made.priority == priority, (key, wished)


async def generate(own: Deployment, metadata: Any, **fields: Any) -> str:
    async with connect(f"127.0.0.1:{own.gateway.grpc_port}") as channel:
        stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        request = GenerateRequest(text="x" * 40, **fields)
        call = stub.Generate(request, metadata=metadata, timeout=5)
        return "".join([response.text async for response in call])


async def test_grpc_asks_for_the_same_keys(guarded: Deployment) -> None:
    for metadata in ((), (("authorization", "Bearer sk-acm"),), (("authorization", ACME),)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(guarded, metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await generate(guarded, (("authorization", f"Bearer {ACME}"),)) == "Hello"
    over_grpc = guarded.router.submissions[-1].request
    await complete(guarded, ACME)
    over_http = guarded.router.submissions[-1].request
    assert over_grpc.root_key == over_http.root_key and over_grpc.tenant == "acme"
    salted = (("authorization", f"Bearer {ACME}"),)
    await generate(guarded, salted, cache_salt="a")
    await complete(guarded, ACME, cache_salt="a")
    own, other = (s.request.root_key for s in guarded.router.submissions[-2:])
    assert own == other != over_grpc.root_key


async def test_a_caller_without_a_key_is_refused_before_its_message(guarded: Deployment) -> None:
    async with connect(f"127.0.0.1:{guarded.gateway.grpc_port}") as channel:
        call = channel.stream_stream("/paceline.v1.GenerateService/Generate")()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_what_callers_send_makes_no_new_time_series(guarded: Deployment) -> None:
    async def series() -> set[str]:
        text = (await guarded.http.get("/metrics")).text
        return {line.rsplit(" ", 1)[0] for line in text.splitlines() if line[:1] != "#"}

    async def varied(index: int) -> None:
        own = {**bearer(ACME), "x-request-id": f"id-{index}", "user-agent": f"agent-{index}"}
        body = {"model": "mock", "prompt": "x", "user": f"u{index}", "cache_salt": f"s{index}"}
        await guarded.http.post("/v1/completions", json=body, headers=own)
        await guarded.http.post("/v1/completions", json=body | {"model": f"m{index}"}, headers=own)
        await guarded.http.get(f"/v1/models/m{index}", headers=own)
        await guarded.http.get(f"/p{index}", headers=own)
        await guarded.http.get("/v1/models", headers=bearer(f"k{index}"))

    await varied(0)
    before = await series()
    for index in range(1, 20):
        await varied(index)
    assert await series() == before
    assert not any("acme" in line for line in before)


async def test_requests_a_minute(model_dir: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys.toml",
        entry("acme", [ACME], requests_per_minute=2),
        entry("other", [OTHER], requests_per_minute=60),
    )
    async with running(model_dir, api_keys=path) as own:
        statuses = [(await complete(own, ACME)).status_code for _ in range(2)]
        started = time.monotonic()
        refused = await complete(own, ACME)
        assert time.monotonic() - started < 0.25
        assert statuses == [200, 200] and refused.status_code == 429
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "2 requests a minute" in error["message"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(own, (("authorization", f"Bearer {ACME}"),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await complete(own, OTHER)).status_code == 200


async def test_tokens_a_minute_count_prompts_and_output(model_dir: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", entry("acme", [ACME], tokens_per_minute=100))
    async with running(model_dir, api_keys=path) as own:
        assert (await complete(own, ACME)).status_code == 200  # 40 + 5
        assert (await complete(own, ACME, prompt="x" * 60)).status_code == 429
        own.router.reply = lambda request: bytes_reply(b"y" * 90)
        assert (await complete(own, ACME, prompt="x", stream=True)).status_code == 200
        assert len(own.router.submissions) == 2
        refused = await complete(own, ACME, prompt="x")  # the output left a debt
        assert refused.status_code == 429 and len(own.router.submissions) == 2
        assert 20 <= int(refused.headers["retry-after"]) <= 23


async def test_requests_at_once(model_dir: Path, tmp_path: Path) -> None:
    limit = entry("acme", [ACME], max_running_requests=1)
    path = write(tmp_path / "keys.toml", limit, entry("other", [OTHER]))
    async with running(model_dir, api_keys=path) as own:
        own.router.reply = lambda request: Reply([[97]] * 500, interval_s=0.01, is_endless=True)
        body = {"model": "mock", "prompt": "x", "stream": True}
        url = "/v1/completions"
        async with own.http.stream("POST", url, json=body, headers=bearer(ACME)) as running_one:
            assert running_one.status_code == 200
            refused = await complete(own, ACME)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            own.router.reply = lambda request: bytes_reply(b"Hello")
            assert (await complete(own, OTHER)).status_code == 200
        await until(lambda: own.gateway.serving.num_running == 0)
        assert (await complete(own, ACME)).status_code == 200


async def opens(own: Deployment, key: str) -> bool:
    return (await own.http.get("/v1/models", headers=bearer(key))).status_code == 200


async def changes(own: Deployment, key: str, to: bool) -> None:
    deadline = time.monotonic() + 3
    while await opens(own, key) is not to:
        assert time.monotonic() < deadline, f"{key} was to change to {to}"


def is_valid(own: Deployment) -> bool:
    text = generate_latest(own.gateway.serving.metrics.registry).decode()
    return "paceline_gateway_key_file_valid 1.0" in text


async def test_the_file_is_read_again_when_it_changes(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "POLL_S", 0.02)
    limited = entry("acme", [ACME], requests_per_minute=2)
    path = write(tmp_path / "keys.toml", limited)
    async with running(model_dir, api_keys=path) as own:
        await complete(own, ACME)
        write(path, limited, entry("other", [OTHER]))
        await changes(own, OTHER, True)
        assert (await complete(own, ACME)).status_code == 200
        assert (await complete(own, ACME)).status_code == 429  # what was used stays used
        write(path, entry("acme", [ACME]), entry("other", [OTHER], max_running_requests=0))
        await until(lambda: not is_valid(own))
        assert await opens(own, ACME) and await opens(own, OTHER)
        assert (await complete(own, ACME)).status_code == 429  # of a wrong file no limit counts
        path.unlink()
        write(path, entry("acme", ["sk-new"]))
        await until(lambda: is_valid(own))
        await changes(own, OTHER, False)
        assert not await opens(own, ACME) and await opens(own, "sk-new")


async def test_nothing_ends_the_reading_of_the_file(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are revoked later would stay valid. A file that cannot be read, or a failure of
    ours, is over without the file's changing again."""
    monkeypatch.setattr(authentication, "POLL_S", 0.02)
    failures: list[Exception] = []
    open_path = Path.open

    def fail(path: Path, *args: Any, **options: Any) -> Any:
        if failures and path.name == "keys.toml":
            raise failures.pop()
        return open_path(path, *args, **options)

    monkeypatch.setattr(Path, "open", fail)
    path = write(tmp_path / "keys.toml", entry("acme", ["sk-0"]))
    async with running(model_dir, api_keys=path) as own:
        for wrong in ("limit = " + "9" * 5000, "limit = " + "[" * 5000):
            write(path, entry("acme", ["sk-0"]) + wrong)
            await until(lambda: not is_valid(own))
            write(path, entry("acme", ["sk-0"]))
            await until(lambda: is_valid(own))
        for number, failure in enumerate((OSError(errno.EMFILE, "no more files"), RuntimeError())):
            failures.append(failure)
            write(path, entry("acme", [f"sk-{number + 1}"]))
            await changes(own, f"sk-{number + 1}", True)
            assert not failures and not await opens(own, f"sk-{number}")
            await until(lambda: is_valid(own))
