"""The board of KV pools and of what moves between workers and tiers."""

from deploy.observability.panels import (
    Board,
    Panel,
    Query,
    rate,
    share,
)

TRANSFER = Board(
    "paceline-transfer",
    "Paceline: KV and transfer",
    (
        Panel(
            "KV pulled",
            "Bps",
            (Query(rate("paceline_transfer_bytes_total", "transport"), "{{transport}}"),),
            "Bytes a second that decode workers read.",
        ),
        Panel(
            "Speed while pulling",
            "Bps",
            (
                Query(
                    f"{rate('paceline_transfer_bytes_total', 'transport')} / "
                    f"({rate('paceline_transfer_seconds_total', 'transport')} > 0)",
                    "{{transport}}",
                ),
            ),
            "Bytes by seconds of reading.",
        ),
        Panel(
            "Links",
            "Bps",
            (Query("paceline_transfer_link_bytes_per_second", "{{source}} → {{instance}}"),),
            "As each reader estimates its links now; pieces are cut by it.",
        ),
        Panel(
            "Links, by their self-test",
            "Bps",
            (Query("paceline_link_self_test_bytes_per_second", "{{source}} → {{instance}}"),),
        ),
        Panel(
            "Latency of links, by their self-test",
            "s",
            (Query("paceline_link_self_test_seconds", "{{source}} → {{instance}}"),),
        ),
        Panel(
            "Links and sources that are not as they should be",
            "short",
            (
                Query("sum(paceline_links_degraded)", "links below their floor"),
                Query("sum(paceline_peers_apart)", "sources kept apart"),
                Query("sum(paceline_peers_quarantined)", "sources in quarantine"),
            ),
            "All should be 0.",
        ),
        Panel(
            "KV pulled by link",
            "Bps",
            (
                Query(
                    rate("paceline_transfer_link_bytes_total", "source, instance, transport"),
                    "{{source}} → {{instance}}, {{transport}}",
                ),
            ),
        ),
        Panel(
            "Where the KV of prompts came from",
            "ops",
            (Query(rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}"),),
            "Tokens a second. What is transferred was computed or found by another worker.",
        ),
        Panel(
            "Tokens that came of those asked of other workers",
            "percentunit",
            (
                Query(
                    share(
                        "vllm:external_prefix_cache_hits_total",
                        "vllm:external_prefix_cache_queries_total",
                    ),
                    "came",
                ),
            ),
        ),
        Panel(
            "Prefixes that other workers held",
            "ops",
            (Query(rate("paceline_prefix_tokens_total", "result"), "{{result}}"),),
            "Tokens a second: pulled, or computed again, and why.",
        ),
        Panel(
            "Pieces",
            "ops",
            (Query(rate("paceline_transfer_pieces_total", "transport"), "{{transport}}"),),
        ),
        Panel(
            "Verification failures and hand-offs not adopted",
            "ops",
            (
                Query(rate("paceline_transfer_mismatches_total"), "pages wrong at the reader"),
                Query(rate("paceline_mismatches_reported_total"), "pages reported to sources"),
                Query(rate("paceline_transfer_failures_total"), "hand-offs not adopted"),
            ),
            "All should be 0; wrong pages are never used.",
        ),
        Panel(
            "Wrong pages by cause, pins without a ticket",
            "ops",
            (
                Query(rate("paceline_mismatch_causes_total", "cause"), "{{cause}}"),
                Query(rate("paceline_pins_refused_total"), "pins refused"),
            ),
        ),
        Panel(
            "Leases",
            "short",
            (
                Query("sum(paceline_leases_active)", "leases"),
                Query("sum(paceline_leases_pages)", "pages under them"),
                Query("sum(paceline_handoffs_held)", "prompts held for a reader"),
            ),
        ),
        Panel(
            "Leases that expired",
            "ops",
            (Query(rate("paceline_leases_expired_total"), "expired"),),
            "Of readers that were silent.",
        ),
        Panel(
            "Local prefix hits",
            "percentunit",
            (
                Query(
                    share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "hits"
                ),
            ),
            "Of the tokens that workers looked up.",
        ),
        Panel(
            "Pages by state",
            "short",
            (Query("sum by (state) (paceline_worker_pages)", "{{state}}"),),
            "Counted while a worker is idle.",
        ),
        Panel(
            "Pages in tiers", "short", (Query("sum by (tier) (paceline_tier_pages)", "{{tier}}"),)
        ),
        Panel(
            "Tier traffic",
            "ops",
            (
                Query(rate("paceline_tier_hits_total", "tier"), "{{tier}}: found"),
                Query(rate("paceline_tier_stored_pages_total", "tier"), "{{tier}}: stored"),
                Query(rate("paceline_tier_evictions_total", "tier"), "{{tier}}: evicted"),
                Query(rate("paceline_tier_dropped_pages_total", "tier"), "{{tier}}: not taken"),
            ),
            "Pages a second.",
        ),
        Panel(
            "Tier reads",
            "Bps",
            (Query(rate("paceline_tier_read_bytes_total", "tier"), "{{tier}}"),),
        ),
        Panel(
            "Time in tier reads",
            "percentunit",
            (Query(rate("paceline_tier_read_seconds_total", "tier"), "{{tier}}"),),
            "Of all its threads together.",
        ),
        Panel(
            "Tier errors",
            "ops",
            (Query(rate("paceline_tier_errors_total", "tier, cause"), "{{tier}}: {{cause}}"),),
        ),
    ),
)
