"""Metrics of a worker, on a registry of its own."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

from paceline.core import metrics as names
from paceline.engine.messages import Emission, Integrity, Load
from paceline.worker.slots import SlotState

if TYPE_CHECKING:
    from paceline.worker.peers import Peer
    from paceline.worker.session import Session

PAGE_STATES = ("free", "mapped", "cached", "pinned", "quarantined")


class WorkerMetrics:
    """Counters rise where things happen; gauges follow the session at each beat."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._running = self._model_gauge(names.VLLM_RUNNING, "Sequences in the batch.")
        self._waiting = self._model_gauge(names.VLLM_WAITING, "Admitted, not in the batch.")
        self._usage = self._model_gauge(names.VLLM_KV_USAGE, "Share of the pages in use.")
        self._queries = self._model_counter(names.VLLM_PREFIX_QUERIES, "Tokens looked up.")
        self._hits = self._model_counter(names.VLLM_PREFIX_HITS, "Tokens found in the cache.")
        self._preemptions = self._model_counter(names.VLLM_PREEMPTIONS, "Preemptions.")
        self._prompt = self._model_counter(names.VLLM_PROMPT_TOKENS, "Prompt tokens.")
        self._generated = self._model_counter(names.VLLM_GENERATION_TOKENS, "Tokens emitted.")
        self.ready = self._gauge(names.WORKER_READY, "1 when the worker takes requests.")
        self.incarnations = self._counter(names.WORKER_INCARNATIONS, "Ranks started.")
        self.redis_up = self._gauge(names.WORKER_REDIS_UP, "1 while Redis takes our events.")
        self._slots = self._gauge(names.WORKER_SLOTS, "Requests held, in any state.")
        self._routers = self._gauge(names.WORKER_ROUTERS, "Attached routers.")
        self._leases = self._gauge(names.LEASES_ACTIVE, "Leases of readers on pages here.")
        self._leased = self._gauge(names.LEASES_PAGES, "Pages under those leases.")
        self._expired = self._gauge(names.LEASES_EXPIRED, "Leases of silent readers.")
        self._handoffs = self._gauge(names.HANDOFFS_HELD, "Prefilled slots held for a reader.")
        self._reported = self._counter(names.MISMATCHES_REPORTED, "Wrong pages, say readers.")
        self.failures = self._counter(names.TRANSFER_FAILURES, "Hand-offs not adopted.")
        self._balanced = self._gauge(names.WORKER_BOOKS_BALANCED, "1: the page states add up.")
        self._pages = Gauge(names.WORKER_PAGES, "Pages.", ["state"], registry=self.registry)
        transport = ["transport"]
        self._bytes = Counter(
            names.TRANSFER_BYTES, "Bytes of KV read.", transport, registry=self.registry
        )
        self._seconds = Counter(
            names.TRANSFER_SECONDS, "Seconds of reading.", transport, registry=self.registry
        )
        self._pieces = Counter(
            names.TRANSFER_PIECES, "Pulls of committed ranges.", transport, registry=self.registry
        )
        self._mismatches = Counter(
            names.TRANSFER_MISMATCHES, "Wrong checksums.", transport, registry=self.registry
        )
        self._num_preemptions = 0

    def emitted(self, event: Emission, slot: SlotState) -> None:
        self._generated.inc(len(event.token_ids))
        if slot.num_emitted == 0 and slot.reserved is None:
            self.looked_up(len(slot.request.token_ids), event.num_cached_tokens)

    def looked_up(self, num_tokens: int, num_cached_tokens: int) -> None:
        self._prompt.inc(num_tokens)
        self._queries.inc(num_tokens)
        self._hits.inc(num_cached_tokens)

    def pulled(self, peer: "Peer") -> None:
        figures, transport = peer.take_figures(), peer.link.transport
        self._bytes.labels(transport).inc(figures.num_bytes)
        self._seconds.labels(transport).inc(figures.seconds)
        self._pieces.labels(transport).inc(figures.num_pieces)
        self._mismatches.labels(transport).inc(figures.num_mismatches)

    def mismatch_reported(self) -> None:
        self._reported.inc()

    def observe(self, session: "Session") -> None:
        self._observe_load(session.load)
        self._slots.set(len(session.slots))
        self._routers.set(len(session.streams))
        self._leases.set(len(session.leases))
        self._leased.set(session.leases.num_pages)
        self._expired.set(session.leases.num_expired)
        self._handoffs.set(len(session.handoffs))

    def observe_pages(self, integrity: Integrity) -> None:
        for state in PAGE_STATES:
            self._pages.labels(state).set(getattr(integrity, f"num_{state}"))
        self._balanced.set(not integrity.problem)

    def _observe_load(self, load: Load) -> None:
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._usage.set(1 - max(load.num_free_pages, 0) / max(load.num_pages, 1))
        fresh = load.num_preemptions - self._num_preemptions
        self._preemptions.inc(fresh if fresh >= 0 else load.num_preemptions)
        self._num_preemptions = load.num_preemptions

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _model_gauge(self, name: str, text: str) -> Gauge:
        made = Gauge(name, text, ["model_name"], registry=self.registry)
        return made.labels(self._model_name)

    def _model_counter(self, name: str, text: str) -> Counter:
        made = Counter(name, text, ["model_name"], registry=self.registry)
        return made.labels(self._model_name)
