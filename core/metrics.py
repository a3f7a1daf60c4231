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
ROUTER_REDIS_UP = "paceline_router_redis_up"
ROUTER_REFUSED_RECORDS = "paceline_router_refused_records_total"  # by reason
ROUTER_LATE_FRAMES = "paceline_router_late_emissions_total"  # of attempts that ended
ROUTER_WORKER_UP = "paceline_router_worker_up"  # by worker and role
ROUTER_WORKER_IN_FLIGHT = "paceline_router_worker_in_flight"  # by worker
ROUTER_WORKER_LOST = "paceline_router_worker_lost_total"  # by reason
ROUTER_TTFT_SECONDS = "paceline_router_ttft_seconds"
ROUTER_TOKEN2_GAP_SECONDS = "paceline_router_token2_gap_seconds"
