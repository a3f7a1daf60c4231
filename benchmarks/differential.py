"""One question, asked in many ways, has one answer: `differences` counts what is not the same.

    split over two workers = one worker = transformers (greedy)
    streaming = in one piece = gRPC, cold and warm, greedy and sampled
    n = 4 with a seed = 4 single requests with the seeds of its choices

Cold is a request of which nothing is cached yet, by a salt of its own; warm is the same once more.
`hit_tokens` proves that warm ones found something, `pulled_mib` that split ones were split.
PACELINE_DIFFERENTIAL_PART=2/4 asks the second of four parts of the prompts, for want of time.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.answer import Answer
from benchmarks.common import Options, publish, show
from benchmarks.deployment import demo_model, deployment, workers_total
from benchmarks.greedy_exact import read_prompts
from benchmarks.loadgen import TIMING, Call, send_all
from benchmarks.reference import Reference
from paceline.client.aio import AsyncClient
from paceline.client.result import Result
from paceline.core import metrics as names
from paceline.core.seeds import seed_of_choice

AT_ONCE = 8
NUM_CHOICES = 4
SEED = 1 << 63 | 6  # needs all 64 bits
GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLED: Mapping[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": SEED}
PATHS: Mapping[str, int] = {"split": 1, "whole": 0}  # prefill workers beside the decode worker


@dataclass(frozen=True, slots=True)
class Said:
    """Of one choice. `token_ids` is None where the form of the answer does not tell them."""

    text: str
    finish: str | None
    token_ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class Asked:
    """All answers of one deployment, by prompt: what was asked is in the names."""

    answers: dict[str, list[Said]]
    hit_tokens: float = 0
    pulled_mib: float = 0


def of_stream(answer: Answer, choice: int = 0) -> Said:
    if not answer.is_complete:
        return Said(f"failed: {answer.error}", None)
    ids = tuple(answer.token_ids(choice))
    return Said(answer.text(choice), answer.finish(choice), ids)


def of_body(answer: Answer) -> Said:
    if not answer.is_complete:
        return Said(f"failed: {answer.error}", None)
    return Said(answer.text(), answer.finish())


def of_result(result: Result) -> Said:
    (choice,) = result.choices
    return Said(choice.text, choice.finish and choice.finish.value, tuple(choice.token_ids))


class Asker:
    """Asks one deployment about all prompts."""

    def __init__(self, base_url: str, grpc: str, model: str, prompts: Sequence[str], limit: int):
        self._base_url = base_url
        self._grpc = grpc
        self._model = model
        self._prompts = prompts
        self._limit = limit

    async def streams(self, salt: str, options: Mapping[str, Any]) -> list[Answer]:
        bodies = [self._body(prompt, salt, options) | {"stream": True} for prompt in self._prompts]
        return await send_all(self._base_url, [Call(b, headers=TIMING) for b in bodies], AT_ONCE)

    async def bodies(self, salt: str, options: Mapping[str, Any]) -> list[Answer]:
        bodies = [self._body(prompt, salt, options) for prompt in self._prompts]
        return await send_all(self._base_url, [Call(b) for b in bodies], AT_ONCE)

    async def results(self, salt: str, options: Mapping[str, Any]) -> list[Result]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(client: AsyncClient, prompt: str) -> Result:
            async with gate:
                chosen: Any = {**options, "max_tokens": self._limit, "cache_salt": salt}
                return await client.generate(prompt, **chosen)

        async with AsyncClient(self._grpc) as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in self._prompts)))

    def _body(self, prompt: str, salt: str, options: Mapping[str, Any]) -> dict[str, Any]:
        fixed = {"model": self._model, "prompt": prompt, "max_tokens": self._limit}
        return {**fixed, "cache_salt": salt, **options}


async def ask(asker: Asker) -> dict[str, list[Said]]:
    """In each form, cold and warm; then choices together and alone."""
    said: dict[str, list[Said]] = {}
    for kind, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for heat in ("cold", "warm"):
            streams = await asker.streams(f"{kind} stream", options)
            bodies = await asker.bodies(f"{kind} body", options)
            results = await asker.results(f"{kind} grpc", options)
            said[f"{kind} stream {heat}"] = list(map(of_stream, streams))
            said[f"{kind} body {heat}"] = list(map(of_body, bodies))
            said[f"{kind} grpc {heat}"] = list(map(of_result, results))
    together = await asker.streams("choices", {**SAMPLED, "n": NUM_CHOICES})
    for choice in range(NUM_CHOICES):
        said[f"choice {choice} of {NUM_CHOICES}"] = [of_stream(a, choice) for a in together]
        alone = {**SAMPLED, "seed": seed_of_choice(SEED, choice)}
        singles = await asker.streams(f"alone {choice}", alone)
        said[f"choice {choice} alone"] = list(map(of_stream, singles))
    return said


def asked(path: str, model: Path, prompts: Sequence[str], limit: int) -> Asked:
    router = {"split_min_tokens": 0}
    with deployment(model, prefill=PATHS[path], router=router) as cluster:
        asker = Asker(cluster.base_url, cluster.grpc_endpoint, model.name, prompts, limit)
        answers = asyncio.run(ask(asker))
        hits = workers_total(cluster, names.VLLM_PREFIX_HITS)
        pulled = workers_total(cluster, names.TRANSFER_BYTES, "decode")
    return Asked(answers, hits, pulled / 2**20)


def num_differing(ours: Sequence[Said], others: Sequence[Said]) -> int:
    """Tokens; where one form does not tell them, texts and endings count as one each."""
    differing = 0
    for a, b in zip(ours, others, strict=True):
        if a.token_ids is not None and b.token_ids is not None:
            pairs = zip(a.token_ids, b.token_ids, strict=False)
            differing += sum(x != y for x, y in pairs) + abs(len(a.token_ids) - len(b.token_ids))
        differing += (a.text != b.text) + (a.finish != b.finish)
    return differing


def num_not_greedy(said: Sequence[Said], prompts: Sequence[str], limit: int, model: Path) -> int:
    reference = Reference(model)
    return sum(
        reference.num_differing(reference.encode(prompt), list(one.token_ids or ()), limit)
        for prompt, one in zip(prompts, said, strict=True)
    )


def compare(split: Asked, whole: Asked) -> dict[str, float]:
    """By what differs in what was asked, over both deployments."""
    found = {"split_whole": 0, "stream_body": 0, "http_grpc": 0, "cold_warm": 0, "choices": 0}
    for name, said in split.answers.items():
        found["split_whole"] += num_differing(said, whole.answers[name])
    for answers in (split.answers, whole.answers):
        for name, said in answers.items():
            if name.endswith("warm"):
                found["cold_warm"] += num_differing(said, answers[name.replace("warm", "cold")])
            if " stream " in name:
                found["stream_body"] += num_differing(said, answers[name.replace("stream", "body")])
                found["http_grpc"] += num_differing(said, answers[name.replace("stream", "grpc")])
            if name.endswith("alone"):
                together = name.replace("alone", f"of {NUM_CHOICES}")
                found["choices"] += num_differing(said, answers[together])
    return {**found}


def asked_prompts(options: Options) -> list[str]:
    prompts = read_prompts()[4::7] if options.quick else read_prompts()
    part, parts = map(int, os.environ.get("PACELINE_DIFFERENTIAL_PART", "1/1").split("/"))
    return prompts[part - 1 :: parts]


def measure(options: Options) -> dict[str, float]:
    model = demo_model()
    prompts = asked_prompts(options)
    limit = 16 if options.quick else 64
    found = {}
    for path in PATHS:
        show(f"differential: {len(prompts)} prompts, {path}")
        found[path] = asked(path, model, prompts, limit)
    split, whole = found["split"], found["whole"]
    figures = compare(split, whole)
    show("comparing with transformers")
    greedy = whole.answers["greedy stream cold"]
    figures["transformers"] = num_not_greedy(greedy, prompts, limit, model)
    answers = split.answers | {f"whole {name}": said for name, said in whole.answers.items()}
    return {
        "differences": sum(figures.values()),
        **{f"differences_{name}": value for name, value in figures.items()},
        "answers": sum(map(len, answers.values())),
        "tokens": sum(len(s.token_ids or ()) for said in answers.values() for s in said),
        "hit_tokens": split.hit_tokens + whole.hit_tokens,
        "pulled_mib_split": split.pulled_mib,
        "pulled_mib_whole": whole.pulled_mib,
    }


def main() -> int:
    return publish("differential", measure)


if __name__ == "__main__":
    sys.exit(main())
