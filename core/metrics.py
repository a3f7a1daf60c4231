"""All metrics, one place: registries, docs/metrics.md, dashboards and alerts follow this table.

A metric is its exported name, which carries type, help and labels. Every label takes few values:
core/metric_labels.py says which. Names that begin with vllm: mean what they mean in vLLM, whose
readers (routers, autoscalers, dashboards) find them here; no two services export the same one, so
that sums over all of a deployment count nothing twice.
"""

from paceline.core.metric import ALL as ALL
from paceline.core.metric import Metric as Metric

_MODEL = ("model_name", "engine")  # vLLM's
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STAGE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600)
_TOKENS_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
_COUNT_BUCKETS = (1, 2, 4, 8, 16)
_HANDOFF_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

# all services
SERVICE_INFO = Metric("gauge", "paceline_service_info", "1.", ("service", "version"))

TRACE_SPANS_EXPORTED = Metric(
    "counter", "paceline_trace_spans_exported_total", "Spans that the collector has taken."
)
TRACE_SPANS_DROPPED = Metric(
    "counter",
    "paceline_trace_spans_dropped_total",
    "Spans that the collector did not take in time. Where traces are on, like the one above.",
)

TLS_CERTIFICATE_EXPIRES = Metric(
    "gauge",
    "paceline_tls_certificate_expires_seconds",
    "Unix time until which the certificate that is shown now is good. Where TLS is on.",
)

# gateway; first vLLM's
TTFT = Metric(
    "histogram",
    "vllm:time_to_first_token_seconds",
    "Arrival of a request to its first token.",
    _MODEL,
    _TTFT_BUCKETS,
)
INTER_TOKEN_LATENCY = Metric(
    "histogram",
    "vllm:inter_token_latency_seconds",
    "Between two emissions of a choice.",
    _MODEL,
    _ITL_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "histogram",
    "vllm:request_time_per_output_token_seconds",
    "Mean time of a request's tokens after the first.",
    _MODEL,
    _ITL_BUCKETS,
)
E2E_LATENCY = Metric(
    "histogram",
    "vllm:e2e_request_latency_seconds",
    "Arrival of a request to its end.",
    _MODEL,
    _E2E_BUCKETS,
)
REQUEST_QUEUE_SECONDS = Metric(
    "histogram",
    "vllm:request_queue_time_seconds",
    "Wait for a worker.",
    _MODEL,
    _STAGE_BUCKETS,
)
REQUEST_PREFILL_SECONDS = Metric(
    "histogram",
    "vllm:request_prefill_time_seconds",
    "A worker is found to first token.",
    _MODEL,
    _STAGE_BUCKETS,
)
REQUEST_DECODE_SECONDS = Metric(
    "histogram",
    "vllm:request_decode_time_seconds",
    "First token to last.",
    _MODEL,
    _STAGE_BUCKETS,
)
REQUEST_INFERENCE_SECONDS = Metric(
    "histogram",
    "vllm:request_inference_time_seconds",
    "A worker is found to last token.",
    _MODEL,
    _STAGE_BUCKETS,
)
REQUEST_PROMPT_TOKENS = Metric(
    "histogram", "vllm:request_prompt_tokens", "Of a request.", _MODEL, _TOKENS_BUCKETS
)
REQUEST_GENERATION_TOKENS = Metric(
    "histogram", "vllm:request_generation_tokens", "Of a request.", _MODEL, _TOKENS_BUCKETS
)
REQUEST_COMPUTED_TOKENS = Metric(
    "histogram",
    "vllm:request_prefill_kv_computed_tokens",
    "Prompt tokens of a request that were computed.",
    _MODEL,
    _TOKENS_BUCKETS,
)
REQUEST_MAX_GENERATION_TOKENS = Metric(
    "histogram",
    "vllm:request_max_num_generation_tokens",
    "Of the longest choice of a request.",
    _MODEL,
    _TOKENS_BUCKETS,
)
REQUEST_PARAMS_N = Metric(
    "histogram", "vllm:request_params_n", "Choices asked for.", _MODEL, _COUNT_BUCKETS
)
REQUEST_PARAMS_MAX_TOKENS = Metric(
    "histogram",
    "vllm:request_params_max_tokens",
    "Most tokens asked for, of a choice.",
    _MODEL,
    _TOKENS_BUCKETS,
)
PROMPT_TOKENS = Metric("counter", "vllm:prompt_tokens_total", "Prompt tokens received.", _MODEL)
PROMPT_TOKENS_CACHED = Metric(
    "counter", "vllm:prompt_tokens_cached_total", "Prompt tokens that were not computed.", _MODEL
)
GENERATION_TOKENS = Metric("counter", "vllm:generation_tokens_total", "Tokens generated.", _MODEL)
REQUEST_SUCCESS = Metric(
    "counter",
    "vllm:request_success_total",
    "Choices that ended, by reason.",
    (*_MODEL, "finished_reason"),
)
STAGE_SECONDS = Metric(
    "histogram",
    "paceline_request_stage_seconds",
    "Where the time of requests went; second_token: first to second of a split request.",
    ("model_name", "stage"),
    _STAGE_BUCKETS,
)
EMBEDDINGS = Metric(
    "counter", "paceline_embeddings_total", "Inputs that were embedded.", ("model_name",)
)
GATEWAY_ERRORS = Metric(
    "counter", "paceline_gateway_errors_total", "Requests refused or failed, by code.", ("code",)
)
GATEWAY_RUNNING = Metric(
    "gauge", "paceline_gateway_running_requests", "Requests that are being served."
)
GATEWAY_KEY_FILE_VALID = Metric(
    "gauge",
    "paceline_gateway_key_file_valid",
    "1, or 0 while the file of API keys is wrong and an earlier state of it counts.",
)
GATEWAY_DISCONNECTS = Metric(
    "counter", "paceline_gateway_client_disconnects_total", "Clients that left early."
)
GATEWAY_MOVED = Metric(
    "counter",
    "paceline_gateway_requests_moved_total",
    "Requests taken to another router, since theirs was lost or drained.",
    ("reason",),
)

# rebalance
REBALANCE_PRESSURE = Metric(
    "gauge",
    "paceline_rebalance_pressure",
    "What waits at the workers of a role over what is wanted: docs/operations.md. 1 is too much.",
    ("role",),
)

# router
ROUTER_QUEUE_LENGTH = Metric(
    "gauge", "paceline_router_queue_length", "Requests waiting for a worker."
)
ROUTER_IN_FLIGHT = Metric(
    "gauge", "paceline_router_in_flight_requests", "Requests admitted and not ended."
)
ROUTER_REQUESTS = Metric(
    "counter", "paceline_router_requests_total", "Requests by how they ended.", ("outcome",)
)
ROUTER_PLANS = Metric(
    "counter", "paceline_router_plans_total", "Attempts by kind of plan.", ("kind",)
)
ROUTER_HOPES = Metric(
    "counter",
    "paceline_router_hopes_total",
    "Times that requests hoped for, by whether they came true and the kind of the last plan.",
    ("hope", "kind", "kept"),
)
ROUTER_REPLANS = Metric(
    "counter", "paceline_router_replans_total", "Attempts that failed, by reason.", ("reason",)
)
ROUTER_REQUESTS_QUARANTINED = Metric(
    "counter",
    "paceline_router_requests_quarantined_total",
    "Requests taken for the cause of the deaths of two workers: they are refused for a while.",
)
ROUTER_BUSY = Metric(
    "counter", "paceline_router_busy_answers_total", "Reservations that were refused for now."
)
ROUTER_MIGRATIONS = Metric(
    "counter",
    "paceline_router_requests_migrated_total",
    "Requests that went on on another worker after they had output, by why.",
    ("reason",),
)
ROUTER_ADMISSION_SECONDS = Metric(
    "histogram",
    "paceline_router_admission_seconds",
    "Until a decode worker has reserved pages for a split request.",
    buckets=_HANDOFF_BUCKETS,
)
ROUTER_PLANNER_ERROR = Metric(
    "histogram",
    "paceline_router_planner_error_ratio",
    "How far a prompt's time to first token was from the one that its plan's cost predicts.",
    buckets=_ERROR_BUCKETS,
)
ROUTER_CACHED_TOKENS_PREDICTED = Metric(
    "counter",
    "paceline_router_cached_tokens_predicted_total",
    "Cached prompt tokens, by the index.",
)
ROUTER_CACHED_TOKENS_REAL = Metric(
    "counter",
    "paceline_router_cached_tokens_real_total",
    "Cached prompt tokens, as workers report.",
)
ROUTER_INDEX_KEYS = Metric("gauge", "paceline_router_index_keys", "Keys in the index.")
ROUTER_INDEX_BYTES = Metric("gauge", "paceline_router_index_bytes", "Memory of the index.")
ROUTER_INDEX_RESYNCS = Metric(
    "counter", "paceline_router_index_resyncs_total", "Snapshots of a worker's keys."
)
ROUTER_INDEX_DIVERGED = Metric(
    "counter",
    "paceline_router_index_diverged_total",
    "Digests of workers that differ from the mirror.",
)
ROUTER_REDIS_UP = Metric("gauge", "paceline_router_redis_up", "1 while Redis answers.")
ROUTER_REFUSED_RECORDS = Metric(
    "counter",
    "paceline_router_refused_records_total",
    "What was read from Redis and refused.",
    ("reason",),
)
ROUTER_LATE_FRAMES = Metric(
    "counter", "paceline_router_late_emissions_total", "Emissions of attempts that had ended."
)
ROUTER_WORKER_UP = Metric(
    "gauge", "paceline_router_worker_up", "1 while connected.", ("worker", "role")
)
ROUTER_REVISION_WORKERS = Metric(
    "gauge",
    "paceline_router_revision_workers",
    "Connected workers by content digest: KV moves among those of one.",
    ("model_name", "revision", "role"),
)
ROUTER_WORKER_IN_FLIGHT = Metric(
    "gauge", "paceline_router_worker_in_flight", "Slots in use.", ("worker",)
)
ROUTER_WORKER_LOST = Metric(
    "counter", "paceline_router_worker_lost_total", "Streams that ended.", ("reason",)
)
ROUTER_WORKERS_QUARANTINED = Metric(
    "gauge",
    "paceline_router_workers_quarantined",
    "Workers that got stuck and get no new work for a while.",
)
ROUTER_WORKERS_EJECTED = Metric(
    "gauge", "paceline_router_workers_ejected", "Workers left alone, as they fail what they get."
)
ROUTER_RETRIES_REFUSED = Metric(
    "counter",
    "paceline_router_retries_refused_total",
    "Failures that were final, as the budget of retries was used up.",
)
ROUTER_TTFT_SECONDS = Metric(
    "histogram",
    "paceline_router_ttft_seconds",
    "Submit to first token, at the router.",
    buckets=_TTFT_BUCKETS,
)
ROUTER_TOKEN2_GAP_SECONDS = Metric(
    "histogram",
    "paceline_router_token2_gap_seconds",
    "First token to second, at the router.",
    buckets=_ITL_BUCKETS,
)

# worker; first vLLM's
VLLM_RUNNING = Metric("gauge", "vllm:num_requests_running", "Sequences in the batch.", _MODEL)
VLLM_WAITING = Metric("gauge", "vllm:num_requests_waiting", "Admitted, not in the batch.", _MODEL)
VLLM_WAITING_BY_REASON = Metric(
    "gauge",
    "vllm:num_requests_waiting_by_reason",
    "Those by what for: rows and pages, or KV of another worker or tier.",
    (*_MODEL, "reason"),
)
VLLM_KV_USAGE = Metric("gauge", "vllm:kv_cache_usage_perc", "Share of pages in use, 0–1.", _MODEL)
VLLM_CACHE_CONFIG = Metric(
    "gauge",
    "vllm:cache_config_info",
    "1; the page pool is in its labels.",
    ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine"),
)
VLLM_LORA = Metric(
    "gauge",
    "vllm:lora_requests_info",
    "Unix time at which its labels were set.",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
VLLM_PREFIX_QUERIES = Metric(
    "counter", "vllm:prefix_cache_queries_total", "Tokens looked up in the local cache.", _MODEL
)
VLLM_PREFIX_HITS = Metric(
    "counter", "vllm:prefix_cache_hits_total", "Tokens found in the local cache.", _MODEL
)
VLLM_PROMPT_TOKENS_BY_SOURCE = Metric(
    "counter",
    "vllm:prompt_tokens_by_source_total",
    "Prompt tokens of a worker's requests, by where their KV came from.",
    (*_MODEL, "source"),
)
VLLM_EXTERNAL_QUERIES = Metric(
    "counter",
    "vllm:external_prefix_cache_queries_total",
    "Prompt tokens asked of another worker.",
    _MODEL,
)
VLLM_EXTERNAL_HITS = Metric(
    "counter",
    "vllm:external_prefix_cache_hits_total",
    "Prompt tokens that came from another worker.",
    _MODEL,
)
VLLM_PREEMPTIONS = Metric("counter", "vllm:num_preemptions_total", "Preemptions.", _MODEL)
WORKER_READY = Metric("gauge", "paceline_worker_ready", "1 when the worker takes requests.")
WORKER_ROLE = Metric(
    "gauge",
    "paceline_worker_role",
    "1 of the role that the worker has now, 0 of others.",
    ("role",),
)
WORKER_ROLE_CHANGES = Metric(
    "counter",
    "paceline_worker_role_changes_total",
    "Changes of the worker's role, by the new one and who asked.",
    ("role", "reason"),
)
WORKER_INCARNATIONS = Metric("counter", "paceline_worker_incarnations_total", "Ranks started.")
WORKER_GENERATED = Metric(
    "counter", "paceline_worker_generated_tokens_total", "Tokens emitted, retries included."
)
WORKER_SLOTS = Metric("gauge", "paceline_worker_slots", "Requests held, in any state.")
WORKER_ROUTERS = Metric("gauge", "paceline_worker_router_streams", "Attached routers.")
WORKER_PAGES = Metric("gauge", "paceline_worker_pages", "Pages by state, when idle.", ("state",))
WORKER_BOOKS_BALANCED = Metric(
    "gauge",
    "paceline_worker_page_books_balanced",
    "1: the page states add up; 0 is a bug. When idle.",
)
WORKER_REDIS_UP = Metric("gauge", "paceline_worker_redis_up", "1 while Redis takes our events.")
TRANSFER_BYTES = Metric(
    "counter", "paceline_transfer_bytes_total", "Bytes of KV read by this worker.", ("transport",)
)
TRANSFER_SECONDS = Metric(
    "counter",
    "paceline_transfer_seconds_total",
    "Seconds of reading, of all threads together.",
    ("transport",),
)
TRANSFER_PIECES = Metric(
    "counter", "paceline_transfer_pieces_total", "Pieces of KV read.", ("transport",)
)
TRANSFER_MISMATCHES = Metric(
    "counter",
    "paceline_transfer_mismatches_total",
    "Pages that failed verification here.",
    ("transport",),
)
TRANSFER_LINK_SPEED = Metric(
    "gauge",
    "paceline_transfer_link_bytes_per_second",
    "Speed of the link from a source, as its pulls show it. Absent before the first one.",
    ("source", "transport"),
)
LINK_TEST_SPEED = Metric(
    "gauge",
    "paceline_link_self_test_bytes_per_second",
    "Speed of the link from a source, by its self-test.",
    ("source", "transport"),
)
LINK_TEST_LATENCY = Metric(
    "gauge",
    "paceline_link_self_test_seconds",
    "Shortest read in that self-test, of one token.",
    ("source", "transport"),
)
LINKS_DEGRADED = Metric(
    "gauge",
    "paceline_links_degraded",
    "1: the link from a source is below the floor, or fell back to a worse transport.",
    ("source", "transport"),
)
PEERS_APART = Metric(
    "gauge",
    "paceline_peers_apart",
    "Sources whose canary, layout or model is another: nothing is read.",
)
PEERS_QUARANTINED = Metric(
    "gauge", "paceline_peers_quarantined", "Sources whose own bytes were wrong, left for a while."
)
MISMATCH_CAUSES = Metric(
    "counter",
    "paceline_mismatch_causes_total",
    "Pages that arrived wrong, by what their source says of them.",
    ("cause",),
)
PINS_REFUSED = Metric(
    "counter", "paceline_pins_refused_total", "Pins without a valid ticket, answered like a miss."
)
TRANSFER_LINK_BYTES = Metric(
    "counter",
    "paceline_transfer_link_bytes_total",
    "Bytes of KV read from a source.",
    ("source", "transport"),
)
HANDOFF_SECONDS = Metric(
    "histogram",
    "paceline_handoff_seconds",
    "At the reader: its command to first and last verified pages; pull_wait: the prompt is computed"
    " to the last page, what of the pull is not hidden.",
    ("stage",),
    _HANDOFF_BUCKETS,
)
PREFIX_TOKENS = Metric(
    "counter",
    "paceline_prefix_tokens_total",
    "Tokens of prompts that another worker held, says the index: pulled, or computed, and why.",
    ("result",),
)
TRANSFER_FAILURES = Metric("counter", "paceline_transfer_failures_total", "Hand-offs not adopted.")
MISMATCHES_REPORTED = Metric(
    "counter", "paceline_mismatches_reported_total", "Wrong pages of this source, say readers."
)
LEASES_ACTIVE = Metric("gauge", "paceline_leases_active", "Leases of readers on pages here.")
LEASES_PAGES = Metric("gauge", "paceline_leases_pages", "Pages under those leases.")
LEASES_EXPIRED = Metric("counter", "paceline_leases_expired_total", "Leases of silent readers.")
HANDOFFS_HELD = Metric("gauge", "paceline_handoffs_held", "Prefilled slots held for a reader.")
TIER_PAGES = Metric("gauge", "paceline_tier_pages", "Pages held now.", ("tier",))
TIER_HITS = Metric("counter", "paceline_tier_hits_total", "Pages found.", ("tier",))
TIER_STORED = Metric("counter", "paceline_tier_stored_pages_total", "Pages taken in.", ("tier",))
TIER_EVICTIONS = Metric(
    "counter", "paceline_tier_evictions_total", "Pages given up for others.", ("tier",)
)
TIER_DROPPED = Metric(
    "counter",
    "paceline_tier_dropped_pages_total",
    "Pages not taken: no room, or the store is behind.",
    ("tier",),
)
TIER_ERRORS = Metric(
    "counter", "paceline_tier_errors_total", "Wrong pages, failed stores.", ("tier", "cause")
)
TIER_READ_BYTES = Metric("counter", "paceline_tier_read_bytes_total", "Bytes read.", ("tier",))
TIER_READ_SECONDS = Metric(
    "counter", "paceline_tier_read_seconds_total", "Seconds of reading.", ("tier",)
)
