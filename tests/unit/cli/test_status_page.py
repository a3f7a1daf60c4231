"""/ui before a real gateway: its data, its guards, and what a browser makes of it."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from paceline.cli import status_page
from paceline.cli.ports import free_port
from paceline.cli.status_page import StatusPage
from paceline.v1.common_pb2 import Placement, PromptTimes
from tests.support.fake_router_service import Reply
from tests.support.gateway_deployment import Deployment, model_info, running
from tests.support.mock_model import write_mock_model
from tests.support.waits import until, wait_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVIL = "<img src=x onerror=document.title='run'>"
BROWSERS = ("chromium-headless-shell", "chromium")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    """After one request for a model with a name that a page must not take for HTML."""
    folder = write_mock_model(tmp_path_factory.mktemp("model"))
    async with running(folder, operator_address="127.0.0.1:0") as deployment:
        deployment.router.set_models([model_info(folder, name=EVIL)])
        await until(lambda: EVIL in deployment.gateway.serving.router.models)
        deployment.router.reply = lambda request: Reply(
            [[97]] * 3,
            interval_s=0.02,
            num_cached_tokens=1,
            prompt_times=PromptTimes(queue_us=2000, prefill_us=30_000),
            placement=Placement(prefill_worker="prefill-0", decode_worker="decode-0"),
        )
        answer = await deployment.http.post("/v1/completions", json={"model": EVIL, "prompt": "Hi"})
        assert answer.status_code == 200
        yield deployment


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def page(deployment: Deployment) -> AsyncIterator[StatusPage]:
    gateway = deployment.gateway
    urls = [f"http://127.0.0.1:{gateway.port}", f"http://127.0.0.1:{free_port('127.0.0.1')}"]
    made = StatusPage(0, lambda: urls, [f"http://127.0.0.1:{gateway.operator_port}"])
    made.start()
    yield made
    await asyncio.to_thread(made.stop)


async def get(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10) as client:
        return await client.get(url, headers=headers)


async def test_its_data_are_those_of_top_and_of_debug_requests(page: StatusPage) -> None:
    found: dict[str, Any] = (await get(f"{page.url}/data")).json()
    assert found["summary"].endswith("cached: 50% of 2 prompt tokens")
    gateways, silent = found["tables"]
    assert (gateways["title"], silent["title"]) == ("gateways", "no answer")
    assert gateways["columns"][:3] == ["role", "address", "running"]
    assert gateways["rows"][0][0] == "gateway"
    (ended,) = found["requests"]["ended"]
    assert ended["attempts"][0]["decode"] == "decode-0"


async def test_a_browser_may_run_its_script_and_nothing_else(page: StatusPage) -> None:
    answer = await get(page.url)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and answer.text.count("<script>") == 1
    assert "http" not in answer.text.replace("<!doctype html>", "")  # nothing from elsewhere
    assert "innerHTML" not in answer.text


async def test_it_answers_to_loopbacks_names_alone(page: StatusPage) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
        assert (await get(f"{page.url}/data", host=host)).status_code == 403
    assert (await get(f"{page.url}/data", host="localhost:80")).status_code == 200
    assert (await get(page.url.replace("/ui", "/"))).status_code == 404


async def test_connections_that_say_nothing_are_bounded(page: StatusPage) -> None:
    address = page.url.split("/")[2].split(":")
    silent = [
        socket.create_connection((address[0], int(address[1])))
        for _ in range(status_page.MAX_CONNECTIONS + 8)
    ]
    try:
        refused = silent[-1]
        refused.settimeout(10)
        assert await asyncio.to_thread(refused.recv, 1) == b""
    finally:
        for connection in silent:
            connection.close()

    def answers() -> bool:
        try:
            return httpx.get(page.url).status_code == 200
        except httpx.HTTPError:
            return False

    await asyncio.to_thread(wait_for, answers, 10)


@pytest.mark.slow
async def test_a_browser_shows_it_and_takes_no_name_for_html(page: StatusPage) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium on PATH: apt install chromium-headless-shell")
    shown = await dom(browser, page.url)
    assert "50% of 2 prompt tokens" in shown and "prefill-0 → decode-0" in shown
    assert "&lt;img src=x onerror=" in shown and "<img" not in shown
    assert "<title>Paceline</title>" in shown
    assert 'class="prefill" title="prefill 30.0 ms"' in shown


async def dom(browser: str, url: str) -> str:
    """After its script has looked once."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=1500"]
    command = [browser, *options, "--dump-dom", url]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=90)
    return ran.stdout.decode()
