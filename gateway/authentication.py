"""From a request's Authorization to its tenant; the key file is read again when it changes.

A file that has become wrong, or is gone, changes nothing: the last good one goes on to count, and
a log line and a metric say so.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import structlog
from prometheus_client import Gauge

from paceline.core.errors import ConfigError, InvalidApiKey, shown
from paceline.gateway.metrics import now_s
from paceline.gateway.tenants import Tenant, TenantTable, default_tenant, read_tenants
from paceline.gateway.usage import Usages

POLL_S = 1.0
_SCHEME = b"bearer "
logger = structlog.stdlib.get_logger("paceline.gateway")

_State = tuple[int, int, int]  # of a file: inode, size, time of its last change
_UNREAD: _State = (-1, -1, -1)  # of no file


class Authentication:
    """Start, `tenant_of` each request, stop. Raises ConfigError for a wrong file at the start."""

    def __init__(
        self, path: Path, secret: str, is_valid: Gauge, usages: Usages | None = None
    ) -> None:
        self._path = path
        self._secret = secret
        self._is_valid = is_valid
        self._usages = usages
        self._task: asyncio.Task[None] | None = None
        self._is_asked = asyncio.Event()
        self._complaint = ""  # that was logged last, since the last good file
        self._default = default_tenant(secret)
        is_open = path == Path()
        self._state: _State | None = None if is_open else _state_of(path)
        self._table = None if is_open else self._read(None)
        is_valid.set(1)

    def start(self) -> None:
        if self._table is not None:
            self._task = asyncio.create_task(self._follow(), name="key-file")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def read_again(self) -> None:
        """Soon, also where nothing seems to have changed; the log tells what came of it."""
        if self._task is None:
            logger.info("no key file to read")
        self._is_asked.set()

    def tenant_of(self, authorization: bytes | None) -> Tenant:
        """`authorization`: "Bearer" and the key. Raises InvalidApiKey."""
        if self._table is None:
            return self._default
        if authorization is None:
            raise InvalidApiKey("An API key is needed: Authorization: Bearer …")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise InvalidApiKey("The Authorization header must be of the form: Bearer …")
        return self._table.of_key(authorization[len(_SCHEME) :].strip())

    async def _follow(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_asked.wait(), POLL_S)
            if self._is_asked.is_set():
                self._is_asked.clear()
                self._state, self._complaint = _UNREAD, ""
            try:
                await self._read_if_changed()
            except Exception as error:  # if this ended here, revoked keys would stay valid for ever
                self._complain(f"our fault: {shown(error)}")

    async def _read_if_changed(self) -> None:
        state = await asyncio.to_thread(_state_of, self._path)
        if state == self._state:
            return
        try:
            table = await asyncio.to_thread(self._read, self._table)
        except ConfigError as error:
            self._complain(error.message)
            if isinstance(error.__cause__, OSError):
                return  # it may become readable without a change, so it is tried again
        else:
            table.put_in_force(now_s())
            self._table = table
            self._complaint = ""
            self._is_valid.set(1)
            logger.info("key file read", num_tenants=len(table.tenants))
        self._state = state

    def _read(self, before: TenantTable | None) -> TenantTable:
        return read_tenants(self._path, self._secret, before, self._usages)

    def _complain(self, why: str) -> None:
        self._is_valid.set(0)
        if why != self._complaint:
            self._complaint = why
            logger.error("key file is wrong", why=why)


def _state_of(path: Path) -> _State | None:
    """None: it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
