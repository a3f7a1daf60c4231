"""Greedy output through gateway → prefill → pull → decode equals transformers' in float32.

40 prompts × 64 tokens, every prompt split over two workers, over shm and over tcp; then with
prompts cut into small chunks, with prefixes found in the cache, and with a pool so small that
requests are preempted. How equality is decided: `benchmarks.reference`. The other figures prove
that the path was really taken: bytes pulled, prompt tokens found, preemptions.
"""

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer
from benchmarks.common import Options, publish, show
from benchmarks.deployment import demo_model, deployment, workers_total
from benchmarks.loadgen import TIMING, Call, send_all
from benchmarks.reference import Reference
from paceline.core import metrics as names

PROMPTS = Path(__file__).with_name("prompts.txt")
MAX_TOKENS = 64
NUM_GENERATED = 4  # prompts that the full form also runs through generate()


@dataclass(frozen=True, slots=True)
class Case:
    """One deployment: `suffix` names its figures, `rounds` how often each prompt is sent."""

    suffix: str
    worker: dict[str, Any]
    at_once: int = 8
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers by prompt, in the order sent, and what the workers counted."""

    answers: list[tuple[str, Answer]]
    counts: dict[str, float] = field(default_factory=dict)


CASES = (
    Case("_shm", {"transports": "shm"}),
    Case("_tcp", {"transports": "tcp"}),
    Case("_chunked", {"max_batch_tokens": 24, "max_running": 8}),
    Case("_prefix", {}, rounds=2),
    Case("_preempted", {"pool_mib": 18, "output_window_tokens": 1}, at_once=16),
)


def read_prompts() -> list[str]:
    return PROMPTS.read_text().removesuffix("\n").split("\n%%\n")


def completion(model: str, prompt: str | list[int], max_tokens: int = MAX_TOKENS) -> Call:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return Call({**body, "stream": True}, headers=TIMING)


def run_case(case: Case, model: Path, prompts: list[str]) -> Outcome:
    """Every prompt through a fresh deployment, one prefill and one decode worker."""
    answers: list[tuple[str, Answer]] = []
    with deployment(model, router={"split_min_tokens": 0}, worker=case.worker) as cluster:
        for _ in range(case.rounds):
            calls = [completion(model.name, prompt) for prompt in prompts]
            got = asyncio.run(send_all(cluster.base_url, calls, case.at_once))
            answers += zip(prompts, got, strict=True)
        counts = {
            "pulled_bytes": workers_total(cluster, names.TRANSFER_BYTES, "decode"),
            "preemptions": workers_total(cluster, names.VLLM_PREEMPTIONS),
            "prefix_hit_tokens": workers_total(cluster, names.VLLM_PREFIX_HITS),
        }
    return Outcome(answers, counts)


def num_differing(outcome: Outcome, reference: Reference) -> int:
    """Tokens that are not greedy, over all answers; an answer that failed counts as a whole."""
    differing = 0
    for prompt, answer in outcome.answers:
        output = answer.token_ids() if answer.is_complete else []
        wrong = reference.num_differing(reference.encode(prompt), output, MAX_TOKENS)
        if wrong:
            show(f"{wrong} tokens differ after {prompt[:40]!r} {answer.error}")
        differing += wrong
    return differing


def num_generated_differing(outcome: Outcome, reference: Reference) -> int:
    """The same for a few prompts by generate() itself."""
    differing = 0
    for prompt, answer in outcome.answers[:NUM_GENERATED]:
        ours = [t for t in answer.token_ids() if t not in reference.eos_token_ids]
        theirs = reference.generate(reference.encode(prompt), MAX_TOKENS)
        differing += abs(len(ours) - len(theirs))
        differing += sum(a != b for a, b in zip(ours, theirs, strict=False))
    return differing


def with_shared_prefixes(prompts: list[str]) -> list[str]:
    """Each prompt, then its longer half again with another end."""
    return prompts + [f"{prompt[: len(prompt) // 2]} In other words," for prompt in prompts]


def measure(options: Options) -> dict[str, float]:
    model = demo_model()
    prompts = read_prompts()[4::7] if options.quick else read_prompts()
    outcomes = {}
    for case in CASES:
        show(f"greedy_exact{case.suffix}: {len(prompts)} prompts")
        sent = with_shared_prefixes(prompts) if case.suffix == "_prefix" else prompts
        outcomes[case.suffix] = run_case(case, model, sent)
    show("comparing with transformers")
    reference = Reference(model)
    wrong = {suffix: num_differing(outcome, reference) for suffix, outcome in outcomes.items()}
    figures: dict[str, float] = {"differing_tokens": wrong["_shm"] + wrong["_tcp"]}
    figures |= {f"differing_tokens{s}": n for s, n in wrong.items() if s not in ("_shm", "_tcp")}
    if not options.quick:
        figures["differing_from_generate"] = num_generated_differing(outcomes["_shm"], reference)
    for suffix, outcome in outcomes.items():
        figures[f"pulled_mib{suffix}"] = round(outcome.counts["pulled_bytes"] / 2**20, 1)
    figures["preemptions_preempted"] = outcomes["_preempted"].counts["preemptions"]
    figures["prefix_hit_tokens_prefix"] = outcomes["_prefix"].counts["prefix_hit_tokens"]
    return figures


def main() -> int:
    return publish("greedy_exact", measure)


if __name__ == "__main__":
    sys.exit(main())
