"""`paceline explain`: what the routers decided of late, and what each term of it was."""

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import grpc

from paceline.cli.router_calls import check_routers, of_router
from paceline.core.config import check_secret, setting
from paceline.core.errors import ConfigError, PacelineError, Unavailable
from paceline.core.tls import PLAIN, TlsConfig
from paceline.gateway.router_addresses import Address, addresses_of
from paceline.rpc import caller_token, channel
from paceline.rpc.status import error_of
from paceline.v1 import control_pb2, control_pb2_grpc

TIMEOUT_S = 5.0
MAX_LAST = 256  # as many as a router keeps


@dataclass(frozen=True, slots=True)
class ExplainConfig:
    """Print the last decisions of all routers; docs/routing.md explains the terms."""

    env_prefix: ClassVar[str] = "PACELINE_EXPLAIN_"

    router: tuple[str, ...] = setting(
        ("127.0.0.1:9100",),
        "gRPC addresses of routers, host:port, as the gateway has them; of a name, all addresses.",
    )
    last: int = setting(10, f"How many decisions, at most; a router keeps {MAX_LAST}.")
    request: str = setting("", "Of this request id alone; empty: of all.")
    secret: str = setting("", "The deployment's secret, which opens the routers.", secret=True)
    tls: TlsConfig = PLAIN

    def __post_init__(self) -> None:
        check_secret(self.secret, self.env_prefix)
        check_routers(self.router)
        fits = 1 <= self.last <= MAX_LAST
        ConfigError.check("last", self.last, fits, f"must lie between 1 and {MAX_LAST}")


@dataclass(frozen=True, slots=True)
class Told:
    """What one router said, or why it said nothing."""

    router: Address
    decisions: tuple[control_pb2.Decision, ...] = ()
    quarantined: tuple[control_pb2.QuarantinedRequest, ...] = ()
    failure: PacelineError | None = None


def run(config: ExplainConfig) -> int:
    """Prints the last decisions of all routers. Those that say nothing get a line on stderr; raises
    Unavailable or IncompatiblePeer when all do."""
    told = asyncio.run(ask_all(config))
    failures = [one for one in told if one.failure is not None]
    if len(failures) == len(told) and failures[0].failure is not None:
        raise of_router(name_of(failures[0].router), failures[0].failure)
    for one in failures:
        print(f"paceline: router {name_of(one.router)}: {one.failure}", file=sys.stderr)
    decided = [(decision, one.router) for one in told for decision in one.decisions]
    decided.sort(key=lambda pair: pair[0].unix_ms)
    for decision, router in decided[-config.last :]:
        first, *rest = lines_of(decision)
        print("\n".join([first + (f" by {name_of(router)}" if len(told) > 1 else ""), *rest]))
    for one in told:
        for caught in one.quarantined:
            print(quarantine_of(caught) + (f" by {name_of(one.router)}" if len(told) > 1 else ""))
    if not decided:
        who = "The router has" if len(told) == 1 else "The routers have"
        print(f"{who} decided nothing yet" + (" of this request." if config.request else "."))
    return 0


async def ask_all(config: ExplainConfig) -> list[Told]:
    told = await asyncio.gather(*(ask_those_of(config, name) for name in config.router))
    return [one for those in told for one in those]


async def ask_those_of(config: ExplainConfig, endpoint: str) -> list[Told]:
    """All addresses of a name."""
    try:
        targets = await addresses_of(endpoint)
    except (OSError, UnicodeError) as error:
        failure = Unavailable(f"{endpoint} is no address: {error}")
        return [Told(Address(endpoint, ""), failure=failure)]
    addresses = [Address(endpoint, target) for target in targets]
    return list(await asyncio.gather(*(ask(config, address) for address in addresses)))


async def ask(config: ExplainConfig, router: Address) -> Told:
    request = control_pb2.ExplainRequest(num_decisions=config.last, request_id=config.request)
    token = caller_token.metadata(config.secret.encode())
    async with channel.connect(router.target, config.tls, authority=router.endpoint) as connection:
        stub = control_pb2_grpc.RouterServiceStub(connection)  # type: ignore[no-untyped-call]
        try:
            response = await stub.Explain(request, metadata=token, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            return Told(router, failure=error_of(failure))
    return Told(router, tuple(response.decisions), tuple(response.quarantined))


def name_of(router: Address) -> str:
    """As it was named, and the address if that says more."""
    address = router.target.partition(":")[2]
    return (
        f"{router.endpoint} ({address})"
        if address not in ("", router.endpoint)
        else router.endpoint
    )


def lines_of(decision: control_pb2.Decision) -> Iterator[str]:
    """The plan, then who was considered for it; `*`: who was taken."""
    clock = time.strftime("%H:%M:%S", time.localtime(decision.unix_ms / 1000))
    tokens = f"{decision.num_tokens} tokens, {decision.num_remaining} to come"
    yield (
        f"{clock} {decision.request_id} attempt {decision.attempt} of {decision.model}:"
        f" {plan_of(decision)} ({tokens})"
    )
    for worker in decision.considered:
        role = "prefill" if worker.is_prefill else "decode"
        mark = "*" if worker.worker_id == taken_of(decision, worker.is_prefill) else " "
        yield f"  {mark} {role:<7} {worker.worker_id}: {cost_of(worker)}"


def taken_of(decision: control_pb2.Decision, is_prefill: bool) -> str:
    """Of that side: who decodes here may have been looked at to prefill, too."""
    return (
        decision.prefill_worker if is_prefill else decision.decode_worker or decision.prefill_worker
    )


def quarantine_of(caught: control_pb2.QuarantinedRequest) -> str:
    """It is shown whatever was asked for: workers died."""
    clock = time.strftime("%H:%M:%S", time.localtime(caught.unix_ms / 1000))
    killed = ", ".join(sorted(life.worker_id for life in caught.killed))
    return (
        f"{clock} {caught.request_id} is in quarantine for {caught.left_s} s more: {killed} died of"
        f" it (fingerprint {caught.fingerprint[:12]})"
    )


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
        "misses": worker.misses,
        "pull": worker.pull,
    }
    rounded = {name: round(tokens) for name, tokens in terms.items()}
    shown = [f"{name} {tokens}" for name, tokens in rounded.items() if tokens or name == "uncached"]
    added = " + ".join(shown)
    return f"{added} = {sum(terms.values()):.0f}, {worker.num_cached_tokens} cached"
