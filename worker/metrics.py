"""Metrics of a worker, on a registry of its own."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from paceline import __version__
from paceline.core import metrics as names
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.core.metric_labels import ROLE_REASONS, ROLES
from paceline.engine.messages import Emission, Integrity, Load
from paceline.worker.pull_choice import Outcome
from paceline.worker.quarantine import Verdict
from paceline.worker.slots import SlotState

if TYPE_CHECKING:
    from paceline.worker.peers import Peer, PeerDirectory
    from paceline.worker.rank_messages import RankReady
    from paceline.worker.session import Session

PAGE_STATES = ("free", "mapped", "cached", "pinned", "quarantined")
ENGINE = "0"  # a worker is one
MAX_LINKS = 256


class WorkerMetrics:
    """Counters rise where things happen; gauges follow the session at each beat."""

    def __init__(self, model_name: str, service: str) -> None:
        registry = self.registry = CollectorRegistry()
        model = model_name, ENGINE
        names.SERVICE_INFO.gauge(registry).labels(service, __version__).set(1)
        names.VLLM_LORA.gauge(registry).labels("0", "", "").set(time.time())
        self._running = names.VLLM_RUNNING.gauge(registry).labels(*model)
        self._waiting = names.VLLM_WAITING.gauge(registry).labels(*model)
        by_reason = names.VLLM_WAITING_BY_REASON.gauge(registry)
        self._wait_for_room = by_reason.labels(*model, "capacity")
        self._wait_for_kv = by_reason.labels(*model, "deferred")
        self._usage = names.VLLM_KV_USAGE.gauge(registry).labels(*model)
        self._cache_config = names.VLLM_CACHE_CONFIG.gauge(registry)
        self._queries = names.VLLM_PREFIX_QUERIES.counter(registry).labels(*model)
        self._hits = names.VLLM_PREFIX_HITS.counter(registry).labels(*model)
        by_source = names.VLLM_PROMPT_TOKENS_BY_SOURCE.counter(registry)
        self._computed = by_source.labels(*model, "local_compute")
        self._found = by_source.labels(*model, "local_cache_hit")
        self._transferred = by_source.labels(*model, "external_kv_transfer")
        self._asked_of_others = names.VLLM_EXTERNAL_QUERIES.counter(registry).labels(*model)
        self._had_of_others = names.VLLM_EXTERNAL_HITS.counter(registry).labels(*model)
        self._preemptions = names.VLLM_PREEMPTIONS.counter(registry).labels(*model)
        self._generated = names.WORKER_GENERATED.counter(registry)
        self.ready = names.WORKER_READY.gauge(registry)
        self._incarnations = names.WORKER_INCARNATIONS.counter(registry)
        self._role = names.WORKER_ROLE.gauge(registry)
        self._role_changes = names.WORKER_ROLE_CHANGES.counter(registry)
        for role in ROLES:
            for reason in ROLE_REASONS:
                self._role_changes.labels(role, reason)
        self.redis_up = names.WORKER_REDIS_UP.gauge(registry)
        self._slots = names.WORKER_SLOTS.gauge(registry)
        self._routers = names.WORKER_ROUTERS.gauge(registry)
        self._leases = names.LEASES_ACTIVE.gauge(registry)
        self._leased = names.LEASES_PAGES.gauge(registry)
        self._expired = names.LEASES_EXPIRED.counter(registry)
        self._handoffs = names.HANDOFFS_HELD.gauge(registry)
        self._reported = names.MISMATCHES_REPORTED.counter(registry)
        self.failures = names.TRANSFER_FAILURES.counter(registry)
        self._balanced = names.WORKER_BOOKS_BALANCED.gauge(registry)
        self._pages = names.WORKER_PAGES.gauge(registry)
        self._bytes = names.TRANSFER_BYTES.counter(registry)
        self._seconds = names.TRANSFER_SECONDS.counter(registry)
        self._pieces = names.TRANSFER_PIECES.counter(registry)
        self._mismatches = names.TRANSFER_MISMATCHES.counter(registry)
        self._prefix_tokens = names.PREFIX_TOKENS.counter(registry)
        for outcome in Outcome:
            self._prefix_tokens.labels(outcome.value)
        self._link_speed = names.TRANSFER_LINK_SPEED.gauge(registry)
        self._test_speed = names.LINK_TEST_SPEED.gauge(registry)
        self._test_latency = names.LINK_TEST_LATENCY.gauge(registry)
        self._degraded = names.LINKS_DEGRADED.gauge(registry)
        self._apart = names.PEERS_APART.gauge(registry)
        self._quarantined = names.PEERS_QUARANTINED.gauge(registry)
        self._causes = names.MISMATCH_CAUSES.counter(registry)
        for verdict in Verdict:
            self._causes.labels(verdict)
        self.pins_refused = names.PINS_REFUSED.counter(registry)
        self._link_bytes = names.TRANSFER_LINK_BYTES.counter(registry)
        self._links: dict[tuple[str, str], None] = {}  # with bytes, the one used last at the end
        handoffs = names.HANDOFF_SECONDS.histogram(registry)
        self.first_byte = handoffs.labels("first_byte")
        self.last_byte = handoffs.labels("last_byte")
        self.pull_wait = handoffs.labels("pull_wait")
        self._num_preemptions = self._num_expired = 0

    def started(self, ready: "RankReady", transports: Iterable[str]) -> None:
        """A new incarnation, which counts from 0. Counters of `transports` begin at 0 here: an
        increase from nothing would not be seen."""
        self._incarnations.inc()
        self._num_preemptions = self._num_expired = 0
        self._cache_config.clear()
        dtype = ready.groups[0].dtype
        labels = str(PAGE_TOKENS), str(ready.num_pages), dtype, "True", ENGINE
        self._cache_config.labels(*labels).set(1)
        for transport in transports:
            for counter in (self._bytes, self._seconds, self._pieces, self._mismatches):
                counter.labels(transport)

    def observe_role(self, role: str) -> None:
        for one in ROLES:
            self._role.labels(one).set(one == role)

    def role_changed(self, role: str, reason: str) -> None:
        self._role_changes.labels(role, reason).inc()
        self.observe_role(role)

    def emitted(self, event: Emission, slot: SlotState) -> None:
        self._generated.inc(len(event.token_ids))
        if slot.num_emitted == 0 and slot.reserved is None:
            num_own = max(0, event.num_cached_tokens - slot.num_pulled_tokens)
            self.looked_up(len(slot.request.token_ids), num_own)
            self._computed.inc(len(slot.request.token_ids) - event.num_cached_tokens)

    def asked_of_others(self, num_tokens: int) -> None:
        self._asked_of_others.inc(num_tokens)

    def had_of_others(self, num_tokens: int) -> None:
        self._had_of_others.inc(num_tokens)
        self._transferred.inc(num_tokens)

    def looked_up(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._queries.inc(num_tokens)
        self._hits.inc(num_cached_tokens)
        self._found.inc(num_cached_tokens)

    def pulled(self, peer: "Peer") -> None:
        figures, transport = peer.take_figures(), peer.link.transport
        self._bytes.labels(transport).inc(figures.num_bytes)
        self._count_link((peer.key[0], transport), figures.num_bytes)
        self._seconds.labels(transport).inc(figures.seconds)
        self._pieces.labels(transport).inc(figures.num_pieces)
        self._mismatches.labels(transport).inc(figures.num_mismatches)

    def _count_link(self, link: tuple[str, str], num_bytes: int) -> None:
        """Sources come and go: the series of the one that was read longest ago makes room."""
        self._links.pop(link, None)
        self._links[link] = None
        if len(self._links) > MAX_LINKS:
            oldest = next(iter(self._links))
            del self._links[oldest]
            self._link_bytes.remove(*oldest)
        self._link_bytes.labels(*link).inc(num_bytes)

    def offered(self, outcome: Outcome, num_tokens: int) -> None:
        """What became of tokens that another worker holds."""
        self._prefix_tokens.labels(outcome.value).inc(num_tokens)

    def mismatch_reported(self) -> None:
        self._reported.inc()

    def judged(self, verdict: Verdict) -> None:
        self._causes.labels(verdict).inc()

    def observe(self, session: "Session") -> None:
        self._observe_load(session.load)
        self._slots.set(len(session.slots))
        self._routers.set(len(session.streams))
        self._leases.set(len(session.leases))
        self._leased.set(session.leases.num_pages)
        self._expired.inc(session.leases.num_expired - self._num_expired)
        self._num_expired = session.leases.num_expired
        self._handoffs.set(len(session.handoffs))
        self._observe_links(session.peers)

    def _observe_links(self, peers: "PeerDirectory") -> None:
        gauges = (self._link_speed, self._test_speed, self._test_latency, self._degraded)
        for gauge in gauges:
            gauge.clear()
        for peer in peers.connected():
            labels = peer.key[0], peer.link.transport
            if peer.statistics.figures.num_pieces:  # before that it is a guess
                self._link_speed.labels(*labels).set(peer.statistics.figures.bytes_per_second)
            if peer.speed is not None:
                self._test_speed.labels(*labels).set(peer.speed.bytes_per_second)
                self._test_latency.labels(*labels).set(peer.speed.seconds)
            self._degraded.labels(*labels).set(bool(peers.fault_of(peer)))
        self._apart.set(len(peers.checks.apart))
        self._quarantined.set(len(peers.quarantine))

    def observe_pages(self, integrity: Integrity) -> None:
        for state in PAGE_STATES:
            self._pages.labels(state).set(getattr(integrity, f"num_{state}"))
        self._balanced.set(not integrity.problem)

    def _observe_load(self, load: Load) -> None:
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._wait_for_room.set(load.num_waiting - load.num_deferred)
        self._wait_for_kv.set(load.num_deferred)
        self._usage.set(1 - max(load.num_free_pages, 0) / max(load.num_pages, 1))
        self._preemptions.inc(max(0, load.num_preemptions - self._num_preemptions))
        self._num_preemptions = load.num_preemptions
