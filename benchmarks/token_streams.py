"""Requests in tokens, sent to a router as a gateway sends them, and when each token arrives.

No text is made: one frame a step brings the tokens of all requests, so that a client of one
process keeps up with thousands of tokens a second.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.core.sampling import SamplingParams
from paceline.gateway.config import GatewayConfig, RouterLinks
from paceline.gateway.mailbox import Mailbox
from paceline.gateway.metrics import GatewayMetrics
from paceline.gateway.router_client import RouterClient
from paceline.rpc.convert import sampling_to_proto
from paceline.v1.common_pb2 import Emission, TokenRequest
from paceline.v1.control_pb2 import ModelInfo

ATTACH_S = 10.0
MAX_PENDING, MAX_PENDING_BYTES = 4096, 8 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A router, the folder of the model that it serves, and who asks: tenants share no KV."""

    endpoint: str
    secret: str = field(repr=False)
    model: Path
    tenant: str = "benchmark"


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy request."""

    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Stream:
    """What came of one request; times of this process's monotonic clock, one a token."""

    sent_s: float
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    emitted_us: list[int] = field(default_factory=list)  # when the engine's step ended, wall clock
    pull_us: int = 0
    error: str = ""

    def take(self, emission: Emission) -> None:
        now = time.perf_counter()
        for token_id in emission.token_ids:
            self.times.append(now)
            self.token_ids.append(token_id)
            self.emitted_us.append(emission.emitted_unix_us)
        self.pull_us = max(self.pull_us, emission.pull_us)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent_s

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Seconds between tokens, of those that ended in this time."""
        return [b - a for a, b in pairwise(self.times) if start_s <= b < end_s]

    def emitted_gaps(self, start_s: float, end_s: float) -> list[float]:
        """The same between the ends of the engine's steps."""
        both = pairwise(zip(self.times, self.emitted_us, strict=True))
        return [(b - a) / 1e6 for (_, a), (at, b) in both if start_s <= at < end_s]


class TokenClient:
    """Of one event loop."""

    def __init__(self, router: RouterClient, model: ModelInfo, target: Target) -> None:
        self._router = router
        self._model = model
        self._tenant = target.tenant
        salt = tenant_salt(target.secret.encode(), target.tenant)
        self._root = root_key(model.content_digest, salt)
        self.begun = asyncio.Semaphore(0)  # released once for each stream that has a token

    async def run(self, ask: Ask) -> Stream:
        """Returns when it has ended, in whatever way."""
        request = self._request(ask)
        stream = Stream(time.perf_counter())
        mailbox = Mailbox(MAX_PENDING, MAX_PENDING_BYTES, lambda: None)
        mailbox.take_now = partial(self._take_unless_last, stream)
        try:
            slot = self._router.submit(request, mailbox)
            has_ended = False
            while not has_ended:
                for emission in await mailbox.next():
                    self._take(stream, emission)
                    has_ended |= bool(emission.finish)
            self._router.forget(slot)
        except PacelineError as error:
            stream.error = error.message
        if not stream.error and len(stream.times) != ask.max_tokens:
            stream.error = f"{len(stream.times)} of {ask.max_tokens} tokens came"
        return stream

    def _take_unless_last(self, stream: Stream, emission: Emission) -> bool:
        if not emission.finish:
            self._take(stream, emission)
        return not emission.finish

    def _take(self, stream: Stream, emission: Emission) -> None:
        if not stream.times:
            self.begun.release()
        stream.take(emission)

    def _request(self, ask: Ask) -> TokenRequest:
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
        return TokenRequest(
            request_id=secrets.token_hex(16),
            model=self._model.name,
            tenant=self._tenant,
            root_key=self._root,
            token_ids=ask.prompt,
            num_prompt_tokens=len(ask.prompt),
            sampling=sampling_to_proto(params),
            choices=[0],
            block_keys=b"".join(chain_keys(self._root, ask.prompt)),
        )


@asynccontextmanager
async def attached(target: Target) -> AsyncIterator[TokenClient]:
    links = RouterLinks((target.endpoint,))
    config = GatewayConfig(model=target.model, links=links, secret=target.secret)
    known = asyncio.Event()
    router = RouterClient(config, known.set, GatewayMetrics().moved)
    router.start()
    try:
        async with asyncio.timeout(ATTACH_S):
            while not router.models:
                await known.wait()
                known.clear()
        (model,) = router.models.values()
        yield TokenClient(router, model, target)
    finally:
        await router.stop()
