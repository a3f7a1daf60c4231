"""What the dashboards show: panels as data, in the order in which a reader looks.

build.py makes Grafana's dashboards of it; tests and benchmarks.alerts put each query to metrics and
to a real Prometheus.
"""

from deploy.observability.panels import (
    Board,
    Panel,
    Query,
    mean,
    quantile,
    quantiles,
    rate,
)
from deploy.observability.transfer_board import TRANSFER

OVERVIEW = Board(
    "paceline-overview",
    "Paceline: overview",
    (
        Panel(
            "Requests",
            "reqps",
            (Query(rate("paceline_router_requests_total", "outcome"), "{{outcome}}"),),
            "How requests end. `completed` and `cancelled` are well.",
        ),
        Panel(
            "Refused or failed at the gateway",
            "reqps",
            (Query(rate("paceline_gateway_errors_total", "code"), "{{code}}"),),
        ),
        Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", quantiles("vllm:inter_token_latency_seconds")),
        Panel(
            "Tokens",
            "ops",
            (
                Query(rate("vllm:prompt_tokens_total"), "prompt"),
                Query(rate("vllm:prompt_tokens_cached_total"), "prompt, cached"),
                Query(rate("vllm:generation_tokens_total"), "output"),
            ),
            "A second.",
        ),
        Panel(
            "Requests at once",
            "short",
            (
                Query("sum(paceline_gateway_running_requests)", "at gateways"),
                Query("sum(paceline_router_queue_length)", "waiting for a worker"),
                Query("sum(vllm:num_requests_running)", "in batches"),
            ),
        ),
        Panel(
            "Workers",
            "short",
            (Query("count by (role) (paceline_router_worker_up == 1)", "{{role}}"),),
            "That routers are connected to.",
        ),
        Panel(
            "Pages in use",
            "percentunit",
            (Query("vllm:kv_cache_usage_perc", "{{instance}}"),),
            "Of the KV pool; cached pages that can be evicted do not count.",
        ),
        Panel(
            "Taken elsewhere",
            "ops",
            (
                Query(rate("paceline_gateway_requests_moved_total", "reason"), "router {{reason}}"),
                Query(rate("paceline_router_requests_migrated_total"), "to another worker"),
            ),
            "Requests that went on at another router, or with output on another worker.",
        ),
        Panel(
            "API keys are as in their file",
            "short",
            (Query("paceline_gateway_key_file_valid", "{{instance}}"),),
            "0: the file is wrong, and an earlier state of it counts.",
        ),
        Panel(
            "Certificates are good for",
            "s",
            (Query("paceline_tls_certificate_expires_seconds - time()", "{{instance}}"),),
            "Where TLS is on.",
        ),
    ),
)

STAGES = "paceline_request_stage_seconds"
REQUESTS = Board(
    "paceline-requests",
    "Paceline: anatomy of a request",
    (
        Panel(
            "Mean time by stage",
            "s",
            (Query(mean(STAGES, "stage"), "{{stage}}"),),
            "prepare, queue, prefill and decode add up; most of pull lies within prefill.",
        ),
        Panel(
            "Time by stage, p95",
            "s",
            (Query(quantile(0.95, STAGES, "stage"), "{{stage}}"),),
        ),
        Panel("Wait for a worker", "s", quantiles("vllm:request_queue_time_seconds")),
        Panel("Prefill", "s", quantiles("vllm:request_prefill_time_seconds")),
        Panel("Decode", "s", quantiles("vllm:request_decode_time_seconds")),
        Panel(
            "A worker is found to last token", "s", quantiles("vllm:request_inference_time_seconds")
        ),
        Panel(
            "First token to second",
            "s",
            quantiles("paceline_router_token2_gap_seconds"),
            "Of all requests: what of a hand-off is not hidden shows here.",
        ),
        Panel(
            "Hand-off at the reader, p95",
            "s",
            (Query(quantile(0.95, "paceline_handoff_seconds", "stage"), "{{stage}}"),),
            "From its command to first and last verified pages; pull_wait is what shows.",
        ),
        Panel("Admission at decode", "s", quantiles("paceline_router_admission_seconds")),
        Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
        Panel(
            "Mean time of a token after the first",
            "s",
            quantiles("vllm:request_time_per_output_token_seconds"),
        ),
        Panel(
            "Tokens of a request, p50 and p95",
            "short",
            tuple(
                Query(quantile(q, f"vllm:request_{side}_tokens"), f"{side} p{round(100 * q)}")
                for side in ("prompt", "generation")
                for q in (0.5, 0.95)
            ),
        ),
        Panel(
            "Computed of a prompt, longest choice, p95",
            "short",
            (
                Query(quantile(0.95, "vllm:request_prefill_kv_computed_tokens"), "computed"),
                Query(quantile(0.95, "vllm:request_max_num_generation_tokens"), "longest choice"),
            ),
        ),
        Panel(
            "Asked for, p95",
            "short",
            (
                Query(quantile(0.95, "vllm:request_params_max_tokens"), "max_tokens"),
                Query(quantile(0.95, "vllm:request_params_n"), "n"),
            ),
        ),
        Panel(
            "Ends of choices",
            "ops",
            (Query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
        ),
        Panel(
            "Clients that left",
            "ops",
            (Query(rate("paceline_gateway_client_disconnects_total"), "left early"),),
        ),
        Panel(
            "Embeddings",
            "ops",
            (Query(rate("paceline_embeddings_total", "model_name"), "{{model_name}}"),),
        ),
        Panel(
            "Spans of traces",
            "ops",
            (
                Query(rate("paceline_trace_spans_exported_total"), "taken by the collector"),
                Query(rate("paceline_trace_spans_dropped_total"), "dropped"),
            ),
            "Where traces are on.",
        ),
    ),
)

ROUTER = Board(
    "paceline-router",
    "Paceline: router",
    (
        Panel(
            "Queue",
            "short",
            (
                Query("sum(paceline_router_queue_length)", "waiting"),
                Query("sum(paceline_router_in_flight_requests)", "admitted"),
            ),
        ),
        Panel("Plans", "ops", (Query(rate("paceline_router_plans_total", "kind"), "{{kind}}"),)),
        Panel(
            "Attempts that failed",
            "ops",
            (Query(rate("paceline_router_replans_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Running requests that went on on another worker",
            "ops",
            (Query(rate("paceline_router_requests_migrated_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Error of the planner",
            "percentunit",
            quantiles("paceline_router_planner_error_ratio"),
            "Of the time to first token that a plan's cost predicts for its worker.",
        ),
        Panel(
            "Hopes that came true",
            "percentunit",
            (
                Query(
                    rate("paceline_router_hopes_total", "hope, kind", '{kept="yes"}')
                    + " / "
                    + rate("paceline_router_hopes_total", "hope, kind"),
                    "{{hope}} {{kind}}",
                ),
            ),
            "Of requests that name ttft_ms or itl_ms. Far below 1: too few workers, or hopes for"
            " what they cannot do.",
        ),
        Panel(
            "Workers by generation",
            "short",
            (
                Query(
                    "max by (model_name, revision, role) (paceline_router_revision_workers)",
                    "{{model_name}} {{revision}} {{role}}",
                ),
            ),
            "KV moves among workers of one content digest. Two of them: an upgrade.",
        ),
        Panel(
            "Reservations refused",
            "ops",
            (Query(rate("paceline_router_busy_answers_total"), "busy"),),
        ),
        Panel(
            "Cached tokens, predicted and real",
            "ops",
            (
                Query(rate("paceline_router_cached_tokens_predicted_total"), "predicted"),
                Query(rate("paceline_router_cached_tokens_real_total"), "real"),
            ),
            "Tokens a second. Far apart: the index does not tell what workers hold.",
        ),
        Panel(
            "Index",
            "bytes",
            (Query("paceline_router_index_bytes", "{{instance}}"),),
        ),
        Panel("Keys in the index", "short", (Query("paceline_router_index_keys", "{{instance}}"),)),
        Panel(
            "Index repairs",
            "ops",
            (
                Query(rate("paceline_router_index_resyncs_total"), "snapshots"),
                Query(rate("paceline_router_index_diverged_total"), "digests that differed"),
                Query(rate("paceline_router_refused_records_total"), "records refused"),
            ),
        ),
        Panel(
            "Workers lost and quarantined",
            "short",
            (
                Query("sum(increase(paceline_router_worker_lost_total[5m]))", "lost in 5 min"),
                Query("sum(paceline_router_workers_quarantined)", "quarantined"),
                Query("sum(paceline_router_workers_ejected)", "ejected"),
                Query(
                    "sum(increase(paceline_router_retries_refused_total[5m]))",
                    "retries refused in 5 min",
                ),
                Query(
                    "sum(increase(paceline_router_requests_quarantined_total[5m]))",
                    "requests that killed two in 5 min",
                ),
            ),
        ),
        Panel(
            "Redis answers",
            "short",
            (
                Query("min(paceline_router_redis_up)", "to routers"),
                Query("min(paceline_worker_redis_up)", "to workers"),
            ),
        ),
        Panel("Time to first token at the router", "s", quantiles("paceline_router_ttft_seconds")),
        Panel(
            "Emissions of ended attempts",
            "ops",
            (Query(rate("paceline_router_late_emissions_total"), "late"),),
        ),
    ),
)

WORKERS = Board(
    "paceline-workers",
    "Paceline: each worker",
    (
        Panel("In the batch", "short", (Query("vllm:num_requests_running", "{{instance}}"),)),
        Panel(
            "Waiting at the worker", "short", (Query("vllm:num_requests_waiting", "{{instance}}"),)
        ),
        Panel(
            "Waiting, by reason",
            "short",
            (Query("vllm:num_requests_waiting_by_reason", "{{instance}} {{reason}}"),),
        ),
        Panel("Pages in use", "percentunit", (Query("vllm:kv_cache_usage_perc", "{{instance}}"),)),
        Panel(
            "Tokens",
            "ops",
            (Query(rate("paceline_worker_generated_tokens_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Preemptions",
            "ops",
            (Query(rate("vllm:num_preemptions_total", "instance"), "{{instance}}"),),
        ),
        Panel("Requests held", "short", (Query("paceline_worker_slots", "{{instance}}"),)),
        Panel(
            "In flight, as routers count",
            "short",
            (Query("sum by (worker) (paceline_router_worker_in_flight)", "{{worker}}"),),
        ),
        Panel("Ready", "short", (Query("paceline_worker_ready", "{{instance}}"),)),
        Panel(
            "Roles",
            "short",
            (Query("sum by (role) (paceline_worker_role)", "{{role}}"),),
            "What workers do now, whatever they were started as.",
        ),
        Panel(
            "Pressure of roles",
            "short",
            (Query("paceline_rebalance_pressure", "{{role}}"),),
            "As `paceline rebalance` sees it: at 1 a role asks for a worker of the other.",
        ),
        Panel(
            "Changes of roles in an hour",
            "short",
            (
                Query(
                    "sum by (role, reason) (increase(paceline_worker_role_changes_total[1h]))",
                    "to {{role}}, {{reason}}",
                ),
            ),
            "By command, or by the controller. Many of the latter: its thresholds are too close.",
        ),
        Panel(
            "Ranks started in an hour",
            "short",
            (Query("increase(paceline_worker_incarnations_total[1h])", "{{instance}}"),),
            "One at the start; more: ranks die.",
        ),
        Panel(
            "Routers attached", "short", (Query("paceline_worker_router_streams", "{{instance}}"),)
        ),
        Panel(
            "Page books balance",
            "short",
            (Query("paceline_worker_page_books_balanced", "{{instance}}"),),
        ),
        Panel(
            "Version and role",
            "short",
            (Query("paceline_service_info", "{{service}} {{version}} {{instance}}"),),
        ),
        Panel(
            "Page pool",
            "short",
            (Query("vllm:cache_config_info", "{{instance}}: {{num_gpu_blocks}} × {{block_size}}"),),
        ),
    ),
)

BOARDS = (OVERVIEW, REQUESTS, TRANSFER, ROUTER, WORKERS)
