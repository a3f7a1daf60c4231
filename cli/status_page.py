"""/ui of `paceline up`: workers, queues, links and requests in a browser, on loopback.

It reads what `paceline top` and /debug/requests show. One page without anything from elsewhere; its
policy lets the browser run this very script and nothing else. Who is asked by another name than
loopback's answers nothing: a site that has its name point here could read along.
"""

import base64
import hashlib
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from paceline.cli import top
from paceline.cli.top import Look, Process
from paceline.core import metrics as names

PAGE = Path(__file__).with_name("status_page.html")
LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 32
FRESH_S = 1.0  # however many look, processes are asked once in so long
TIMEOUT_S = 5.0
_NAMES = frozenset({LOOPBACK, "localhost"})
_NO_REQUESTS: dict[str, Any] = {"running": [], "ended": []}


class StatusPage:
    """Start, stop. `urls`: of /metrics of each process, as they are now; `operator_urls`: where
    processes of the gateway show /debug/requests."""

    def __init__(
        self, port: int, urls: Callable[[], Sequence[str]], operator_urls: Sequence[str]
    ) -> None:
        self._urls = urls
        self._operator_urls = operator_urls
        self._lock = threading.Lock()
        self._before: dict[str, Look] = {}
        self._shown = b""
        self._shown_at = float("-inf")
        self._server = _Server((LOOPBACK, port), type("Handler", (_Handler,), {"page": self}))
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}/ui"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="status-page", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def data(self) -> bytes:
        """JSON of the tables and of the gateway's requests, a second old at most."""
        with self._lock:
            if time.monotonic() - self._shown_at > FRESH_S:
                self._shown = orjson.dumps(self._look())
                self._shown_at = time.monotonic()
            return self._shown

    def _look(self) -> dict[str, Any]:
        urls = list(self._urls())
        with ThreadPoolExecutor(max(1, min(32, len(urls)))) as threads:
            looks = list(threads.map(top.look, urls))
        processes = [Process(now, self._before.get(now.url, now)) for now in looks]
        self._before = {now.url: now for now in looks}
        return {
            "summary": _summary(processes),
            "tables": _tables(processes),
            "requests": _requests(self._operator_urls),
        }


def _summary(processes: list[Process]) -> str:
    def total(name: str) -> float:
        return sum(process.now.total(name) for process in processes)

    asked, cached = total(names.PROMPT_TOKENS), total(names.PROMPT_TOKENS_CACHED)
    hits = f"{cached / asked:.0%} of {asked:.0f} prompt tokens" if asked else "no prompt yet"
    running, waiting = total(names.GATEWAY_RUNNING), total(names.ROUTER_QUEUE_LENGTH)
    return f"{running:.0f} requests run, {waiting:.0f} wait for a worker; cached: {hits}"


def _tables(processes: list[Process]) -> list[dict[str, Any]]:
    kinds = (
        ("gateways", top.GATEWAY, ("gateway",)),
        ("routers", top.ROUTER, ("router",)),
        ("workers", top.WORKER, top.WORKER_SERVICES),
        ("no answer", (), ("",)),
    )
    found = []
    for title, columns, services in kinds:
        rows = [
            [p.now.role, urlsplit(p.now.url).netloc, *(show(p) for _, show in columns)]
            for p in processes
            if p.now.service in services
        ]
        heads = ["role", "address", *(name for name, _ in columns)]
        found.append({"title": title, "columns": heads, "rows": rows})
    links = [list(link) for link in top.speeds(processes)]
    found.append({"title": "links", "columns": ["from", "to", "over", "GB/s"], "rows": links})
    return [part for part in found if part["rows"]]


def _requests(operator_urls: Sequence[str]) -> dict[str, Any]:
    """Running ones the oldest first, ended ones the latest first, whichever process has them."""
    found = list(map(_requests_of, operator_urls))
    pages = {name: [one for page in found for one in page[name]] for name in _NO_REQUESTS}
    for name, requests in pages.items():
        requests.sort(key=lambda one: float(one["arrived_unix_ms"]), reverse=name == "ended")
    return pages


def _requests_of(operator_url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{operator_url}/debug/requests", timeout=TIMEOUT_S) as answer:
            found: dict[str, Any] = orjson.loads(answer.read(top.MAX_BYTES))
            return found
    except (OSError, ValueError):  # it is being restarted
        return _NO_REQUESTS


class _Server(ThreadingHTTPServer):
    """Of the connections beyond the bound none is answered."""

    daemon_threads = True
    request_queue_size = 2 * MAX_CONNECTIONS  # else the kernel lets some wait for seconds
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has left is no news."""


class _Handler(BaseHTTPRequestHandler):
    page: StatusPage
    timeout = TIMEOUT_S
    _html = PAGE.read_bytes()

    def do_GET(self) -> None:
        host = self.headers.get("host", "").rsplit(":", 1)[0]
        if host not in _NAMES:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"ask for 127.0.0.1\n")
        elif self.path == "/ui":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self._html)
        elif self.path == "/ui/data":
            self._answer(HTTPStatus.OK, "application/json", self.page.data())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def _policy(html: str) -> str:
    """Script and style by their hashes, data from here, and nothing else."""

    def of(tag: str) -> str:
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        return f"{tag}-src 'sha256-{digest}'"

    fixed = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {of('script')}; {of('style')}; connect-src 'self'; {fixed}"


POLICY = _policy(PAGE.read_text())
