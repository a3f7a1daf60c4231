"""A router in this process, with a real Redis, scripted workers and a client on real sockets."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import redis.asyncio

from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.router.config import RouterConfig
from paceline.router.service import Router
from paceline.rpc import caller_token, channel
from paceline.v1 import common_pb2, control_pb2, control_pb2_grpc, worker_pb2
from tests.support.fake_worker import DIGEST, MODEL, SECRET, Cluster, FakeWorker, tokens_of
from tests.support.redis_server import RedisServer
from tests.support.waits import until


class Answer:
    """What the client saw of one request."""

    def __init__(self, slot: int, seed: int) -> None:
        self.slot = slot
        self.seed = seed
        self.tokens: dict[int, list[int]] = {}
        self.times: list[float] = []
        self.finished: set[int] = set()
        self.error: common_pb2.Error | None = None
        self.is_given_back = False
        self.num_ends = 0
        self.num_choices = 1
        self.request = common_pb2.TokenRequest()
        self.last: common_pb2.Emission | None = None
        self.setbacks: list[control_pb2.SlotSetback] = []

    @property
    def ended(self) -> bool:
        return self.error is not None or len(self.finished) == self.num_choices

    @property
    def longest_pause_s(self) -> float:
        return max(b - a for a, b in itertools.pairwise(self.times))

    def take(self, emission: common_pb2.Emission) -> None:
        log = self.tokens.setdefault(emission.choice, [])
        assert emission.position == len(log), "a gap or a repetition"
        assert emission.choice not in self.finished, "emissions after the end"
        log.extend(emission.token_ids)
        self.last = emission
        self.times.append(asyncio.get_running_loop().time())
        if emission.finish:
            self.finished.add(emission.choice)

    def check(self, num_tokens: int) -> None:
        """Every choice has the tokens that an undisturbed run gives."""
        assert self.error is None, self.error
        for choice in range(self.num_choices):
            assert self.tokens[choice] == tokens_of(self.seed, choice, num_tokens)


class Client:
    """A gateway's stream."""

    def __init__(self, port: int, secret: str = SECRET) -> None:
        self._channel = channel.connect(f"127.0.0.1:{port}")
        token = caller_token.metadata(secret.encode())
        self.call = control_pb2_grpc.RouterServiceStub(self._channel).Attach(metadata=token)
        self.answers: dict[int, Answer] = {}
        self.models: list[control_pb2.ModelInfo] = []
        self.knows_models = False
        self.is_told_to_leave = False
        self.num_frames = 0
        self._seeds = itertools.count(1)
        self._write_lock = asyncio.Lock()  # a call takes one write at a time
        self._reader = asyncio.create_task(self._read())

    async def submit(
        self, num_prompt: int = 100, max_tokens: int = 8, n: int = 1, **fields: Any
    ) -> Answer:
        seed = next(self._seeds)
        answer = self.answers[seed] = Answer(fields.pop("slot", seed), seed)
        answer.num_choices = n
        request = answer.request = make_request(seed, num_prompt, max_tokens, n, **fields)
        submit = control_pb2.SubmitRequest(slot=answer.slot, request=request)
        await self._write(control_pb2.GatewayFrame(submit=submit))
        return answer

    async def go_on(self, begun: Answer, epoch: int) -> Answer:
        """With a request that this or another router has begun, after the tokens so far."""
        slot, tokens = next(self._seeds), list(begun.tokens[0])
        answer = self.answers[slot] = Answer(slot, begun.seed)
        answer.tokens[0] = list(tokens)
        again = common_pb2.TokenRequest()
        again.CopyFrom(begun.request)
        again.epoch = epoch
        again.token_ids.extend(tokens)
        submit = control_pb2.SubmitRequest(slot=slot, request=again)
        await self._write(control_pb2.GatewayFrame(submit=submit))
        return answer

    async def cancel(self, answer: Answer, *choices: int) -> None:
        cancel = control_pb2.CancelRequest(slot=answer.slot, choices=choices)
        await self._write(control_pb2.GatewayFrame(cancel=cancel))

    async def generate(self, **fields: Any) -> Answer:
        answer = await self.submit(**fields)
        await until(lambda: answer.ended, 20)
        return answer

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _write(self, frame: control_pb2.GatewayFrame) -> None:
        async with self._write_lock:
            await self.call.write(frame)

    async def _read(self) -> None:
        while (frame := await self.call.read()) is not grpc.aio.EOF:
            self.num_frames += 1
            for emission in frame.emissions:
                self.answers[emission.slot].take(emission)
            for setback in frame.setbacks:
                self.answers[setback.slot].setbacks.append(setback)
            for failed in frame.errors:
                answer = self.answers[failed.slot]
                answer.error = failed.error
                answer.is_given_back = failed.elsewhere
                answer.num_ends += 1
            self.is_told_to_leave |= frame.draining
            self.knows_models |= frame.models_changed
            if frame.models_changed:
                self.models = list(frame.models)


def make_request(
    seed: int, num_prompt: int, max_tokens: int, n: int = 1, **fields: Any
) -> common_pb2.TokenRequest:
    prompt = fields.pop("prompt", None) or [(seed * 31 + i) % 32000 for i in range(num_prompt)]
    tenant = fields.get("tenant", "t")
    root = root_key(fields.pop("digest", DIGEST), tenant_salt(SECRET.encode(), tenant))
    sampling = common_pb2.SamplingParams(
        max_tokens=max_tokens,
        temperature=1,
        top_p=1,
        seed=seed,
        n=n,
        num_prompt_logprobs=fields.pop("num_prompt_logprobs", None),
    )
    given = {
        "request_id": f"request-{seed}",
        "model": MODEL,
        "tenant": "t",
        "root_key": root,
        "token_ids": prompt,
        "num_prompt_tokens": len(prompt),
        "sampling": sampling,
        "choices": range(n),
        "budget_ms": 30_000,
        "block_keys": b"".join(chain_keys(root, prompt)),
        **fields,
    }
    return common_pb2.TokenRequest(**given)


class Bench:
    def __init__(self, redis_server: RedisServer, **settings: Any) -> None:
        self.redis_server = redis_server
        self.redis = redis.asyncio.Redis.from_url(redis_server.url, socket_timeout=1)
        config: dict[str, Any] = {"port": 0, "probe_port": 0, "secret": SECRET, **settings}
        self.router = Router(RouterConfig(redis_url=redis_server.url, **config))
        self.cluster = Cluster()
        self.workers: dict[str, FakeWorker] = {}
        self.clients: list[Client] = []
        self._leases = asyncio.create_task(self._keep_leases())

    async def add(self, worker_id: str, **fields: Any) -> FakeWorker:
        """Starts a worker and waits until the router has it. p…: prefill."""
        worker = await self.prepare(worker_id, **fields)
        await self.admit(worker)
        return worker

    async def prepare(self, worker_id: str, **fields: Any) -> FakeWorker:
        """Starts a worker that the router does not know yet."""
        prefill = worker_id.startswith("p")
        role = worker_pb2.ROLE_PREFILL if prefill else worker_pb2.ROLE_DECODE
        worker = FakeWorker(worker_id, role, self.cluster)
        for name, value in fields.items():
            setattr(worker, name, value)
        await worker.start()
        return worker

    async def admit(self, worker: FakeWorker) -> None:
        self.workers[worker.worker_id] = worker
        await self.register(worker)
        await self.router.follower.discover()
        await self.up(worker)

    async def register(self, worker: FakeWorker) -> None:
        key = f"pl:1:worker:{worker.worker_id}"
        await self.redis.set(key, worker.info.SerializeToString(), px=3000)

    async def up(self, worker: FakeWorker) -> None:
        def is_up() -> bool:
            link = self.router.fleet.links.get(worker.worker_id)
            session = link.session if link else None
            return session is not None and session.info.incarnation == worker.info.incarnation

        await until(is_up)

    async def client(self, *, is_heard: bool = True) -> Client:
        client = Client(self.router.port)
        self.clients.append(client)
        if is_heard:
            await until(lambda: client.num_frames)
        return client

    async def check_idle(self) -> None:
        """Nothing of any request is left anywhere: every counter is exactly 0."""
        coordinator = self.router.coordinator
        await until(lambda: not coordinator.num_in_flight and not len(coordinator.queue))
        for session in self.router.fleet.sessions():
            assert (session.num_in_flight, session.pending_tokens) == (0, 0)
        await until(lambda: not any(worker.open_slots for worker in self.workers.values()))

    async def close(self) -> None:
        self._leases.cancel()
        for client in self.clients:
            await client.close()
        await self.router.stop()
        for worker in self.workers.values():
            await worker.die()
        await self.redis.aclose()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for worker in list(self.workers.values()):
                try:
                    await self.register(worker)
                except (redis.exceptions.RedisError, OSError):
                    await asyncio.sleep(0.1)


@asynccontextmanager
async def router_bench(redis_server: RedisServer, **settings: Any) -> AsyncIterator[Bench]:
    await flush(redis_server)
    bench = Bench(redis_server, **settings)
    await bench.router.start()
    try:
        yield bench
    finally:
        await bench.close()


async def flush(redis_server: RedisServer) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
