"""Labels of all metrics, with the values that each takes: few, so that series stay few."""

ROLES = ("prefill", "decode", "both")
ROLE_REASONS = ("command", "rebalance")

LABELS = {
    "model_name": "models that workers serve",
    "engine": "`0`: a worker is one engine, and so is a deployment seen at its gateway",
    "service": "`gateway`, `router`, `rebalance`, `prefill`, `decode`",
    "version": "of Paceline, one a process",
    "stage": "of requests `prepare`, `queue`, `prefill`, `pull`, `second_token`, `decode`;"
    " of hand-offs `first_byte`, `last_byte`, `pull_wait`",
    "code": "error codes of core/errors.py",
    "outcome": "`completed`, `deadline`, `cancelled`, `bug`, and error codes",
    "kind": "`whole`, `split`",
    "hope": "`ttft`, `itl`",
    "kept": "`yes`, `no`",
    "result": "`pulled`, or why not: docs/routing.md",
    "reason": (
        "error codes of attempts; gRPC codes and what else ends a stream; forms of records; of "
        "what waits `capacity`, `deferred`; of changes of roles `command`, `rebalance`"
    ),
    "finished_reason": "`stop`, `length`, `cancelled`",
    "role": "`prefill`, `decode`, `both`",
    "worker": "connected workers",
    "revision": "first 12 digits of the content digests of connected workers",
    "state": "`free`, `mapped`, `cached`, `pinned`, `quarantined`",
    "transport": "registered transports",
    "source": "of links, workers that are read from, 256 at most; of prompt tokens"
    " `local_compute`, `local_cache_hit`, `external_kv_transfer`",
    "tier": "configured tiers",
    "cause": "of tiers `mismatch`, `store`; of mismatches `source`, `link`, `gone`, `silent`",
    "block_size": "one a process",
    "num_gpu_blocks": "one a process",
    "cache_dtype": "one a process",
    "enable_prefix_caching": "`True`",
    "max_lora": "`0`: adapters are not served",
    "running_lora_adapters": "empty",
    "waiting_lora_adapters": "empty",
}
