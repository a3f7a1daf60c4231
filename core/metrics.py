"""Names of all metrics, one place: dashboards and alerts are checked against it.

Each service appends its own below; one line a metric, with the unit in its name.
"""

# router
ROUTER_QUEUE_LENGTH = "paceline_router_queue_length"
ROUTER_IN_FLIGHT = "paceline_router_in_flight_requests"
ROUTER_REQUESTS = "paceline_router_requests_total"  # by outcome
ROUTER_PLANS = "paceline_router_plans_total"  # by kind
ROUTER_REPLANS = "paceline_router_replans_total"  # by reason
ROUTER_BUSY = "paceline_router_busy_answers_total"
ROUTER_CACHED_TOKENS_PREDICTED = "paceline_router_cached_tokens_predicted_total"
ROUTER_CACHED_TOKENS_REAL = "paceline_router_cached_tokens_real_total"
ROUTER_INDEX_KEYS = "paceline_router_index_keys"
ROUTER_INDEX_BYTES = "paceline_router_index_bytes"
ROUTER_INDEX_RESYNCS = "paceline_router_index_resyncs_total"
ROUTER_INDEX_DIVERGED = "paceline_router_index_diverged_total"
ROUTER_REDIS_UP = "paceline_router_redis_up"
ROUTER_REFUSED_RECORDS = "paceline_router_refused_records_total"  # by reason
ROUTER_LATE_FRAMES = "paceline_router_late_emissions_total"  # of attempts that ended
ROUTER_WORKER_UP = "paceline_router_worker_up"  # by worker and role
ROUTER_WORKER_IN_FLIGHT = "paceline_router_worker_in_flight"  # by worker
ROUTER_WORKER_LOST = "paceline_router_worker_lost_total"  # by reason
ROUTER_TTFT_SECONDS = "paceline_router_ttft_seconds"
ROUTER_TOKEN2_GAP_SECONDS = "paceline_router_token2_gap_seconds"

# worker; the names of vLLM where the meaning is the same (label model_name)
VLLM_RUNNING = "vllm:num_requests_running"
VLLM_WAITING = "vllm:num_requests_waiting"
VLLM_KV_USAGE = "vllm:kv_cache_usage_perc"
VLLM_PREFIX_QUERIES = "vllm:prefix_cache_queries"  # tokens; counters end in _total
VLLM_PREFIX_HITS = "vllm:prefix_cache_hits"
VLLM_PREEMPTIONS = "vllm:num_preemptions"
VLLM_PROMPT_TOKENS = "vllm:prompt_tokens"
VLLM_GENERATION_TOKENS = "vllm:generation_tokens"
WORKER_READY = "paceline_worker_ready"
WORKER_INCARNATIONS = "paceline_worker_incarnations_total"
WORKER_SLOTS = "paceline_worker_slots"
WORKER_ROUTERS = "paceline_worker_router_streams"
WORKER_PAGES = "paceline_worker_pages"  # by state; when idle
WORKER_BOOKS_BALANCED = "paceline_worker_page_books_balanced"  # 0 is a bug; when idle
TRANSFER_BYTES = "paceline_transfer_bytes_total"  # by transport; copied by this reader
TRANSFER_SECONDS = "paceline_transfer_seconds_total"  # by transport
TRANSFER_PIECES = "paceline_transfer_pieces_total"  # by transport
TRANSFER_MISMATCHES = "paceline_transfer_mismatches_total"  # by transport
TRANSFER_FAILURES = "paceline_transfer_failures_total"  # hand-offs that were not adopted
MISMATCHES_REPORTED = "paceline_mismatches_reported_total"  # to this source by readers
LEASES_ACTIVE = "paceline_leases_active"
LEASES_PAGES = "paceline_leases_pages"
LEASES_EXPIRED = "paceline_leases_expired_total"
HANDOFFS_HELD = "paceline_handoffs_held"
TIER_PAGES = "paceline_tier_pages"  # by tier, as all of these; held now
TIER_HITS = "paceline_tier_hits_total"  # pages found
TIER_STORED = "paceline_tier_stored_pages_total"
TIER_EVICTIONS = "paceline_tier_evictions_total"
TIER_DROPPED = "paceline_tier_dropped_pages_total"  # not taken: no room, or the store is behind
TIER_ERRORS = "paceline_tier_errors_total"  # by cause too: mismatch, store
TIER_READ_BYTES = "paceline_tier_read_bytes_total"
TIER_READ_SECONDS = "paceline_tier_read_seconds_total"
WORKER_REDIS_UP = "paceline_worker_redis_up"

# gateway; the first block has vLLM's names, which routers and dashboards read
TTFT = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "vllm:inter_token_latency_seconds"
E2E_LATENCY = "vllm:e2e_request_latency_seconds"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
REQUEST_SUCCESS = "vllm:request_success_total"  # choices, by finished_reason
GATEWAY_ERRORS = "paceline_gateway_errors_total"  # by code
GATEWAY_RUNNING = "paceline_gateway_running_requests"
GATEWAY_KEY_FILE_VALID = "paceline_gateway_key_file_valid"  # 0: an earlier one counts
GATEWAY_DISCONNECTS = "paceline_gateway_client_disconnects_total"
