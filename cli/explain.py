"""`paceline explain`: what a router decided of late, and what each term of it was."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import grpc

from paceline.core.config import check_secret, setting
from paceline.core.errors import ConfigError
from paceline.core.tls import PLAIN, TlsConfig
from paceline.rpc import caller_token, channel
from paceline.rpc.status import error_of
from paceline.v1 import control_pb2, control_pb2_grpc

TIMEOUT_S = 5.0
MAX_LAST = 256  # as many as a router keeps


@dataclass(frozen=True, slots=True)
class ExplainConfig:
    """Print the last decisions of a router; docs/routing.md explains the terms."""

    env_prefix: ClassVar[str] = "PACELINE_EXPLAIN_"

    router: str = setting("127.0.0.1:9100", "gRPC address of the router, host:port.")
    last: int = setting(10, f"How many decisions, at most; a router keeps {MAX_LAST}.")
    request: str = setting("", "Of this request id alone; empty: of all.")
    secret: str = setting("", "The deployment's secret, which opens the router.", secret=True)
    tls: TlsConfig = PLAIN

    def __post_init__(self) -> None:
        check_secret(self.secret, self.env_prefix)
        fits = 1 <= self.last <= MAX_LAST
        ConfigError.check("last", self.last, fits, f"must lie between 1 and {MAX_LAST}")


def run(config: ExplainConfig) -> int:
    """Prints them. Raises Unavailable, or IncompatiblePeer when the secret is another one."""
    decisions = asyncio.run(fetch(config))
    for decision in decisions:
        print("\n".join(lines_of(decision)))
    if not decisions:
        print(
            "The router has decided nothing yet" + (" of this request." if config.request else ".")
        )
    return 0


async def fetch(config: ExplainConfig) -> list[control_pb2.Decision]:
    request = control_pb2.ExplainRequest(num_decisions=config.last, request_id=config.request)
    token = caller_token.metadata(config.secret.encode())
    async with channel.connect(config.router, config.tls) as connection:
        stub = control_pb2_grpc.RouterServiceStub(connection)  # type: ignore[no-untyped-call]
        try:
            response = await stub.Explain(request, metadata=token, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from None
    return list(response.decisions)


def lines_of(decision: control_pb2.Decision) -> Iterator[str]:
    """The plan, then who was considered for it; `*`: who was taken."""
    clock = time.strftime("%H:%M:%S", time.localtime(decision.unix_ms / 1000))
    tokens = f"{decision.num_tokens} tokens, {decision.num_remaining} to come"
    taken = {decision.prefill_worker, decision.decode_worker}
    yield (
        f"{clock} {decision.request_id} attempt {decision.attempt} of {decision.model}:"
        f" {plan_of(decision)} ({tokens})"
    )
    for worker in decision.considered:
        mark = "*" if worker.worker_id in taken else " "
        role = "prefill" if worker.is_prefill else "decode"
        yield f"  {mark} {role:<7} {worker.worker_id}: {cost_of(worker)}"


def plan_of(decision: control_pb2.Decision) -> str:
    if decision.decode_worker in ("", decision.prefill_worker):
        return f"whole on {decision.prefill_worker}"
    return f"prefill on {decision.prefill_worker}, decode on {decision.decode_worker}"


def cost_of(worker: control_pb2.ConsideredWorker) -> str:
    terms = {
        "uncached": worker.uncached,
        "waiting": worker.waiting,
        "unreported": worker.unreported,
        "running": worker.running,
        "balance": worker.balance,
    }
    added = " + ".join(f"{name} {tokens:.0f}" for name, tokens in terms.items())
    return f"{added} = {sum(terms.values()):.0f}, {worker.num_cached_tokens} cached"
