"""One Generate call, from its message to those of its answer, whoever brings it."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator

from paceline.gateway.choice import Choice, Delta
from paceline.gateway.completions import completion_room
from paceline.gateway.deadline import Deadline
from paceline.gateway.generation import Generation
from paceline.gateway.jobs import Job, TextOptions
from paceline.gateway.logprobs import checked_count
from paceline.gateway.request_log import Origin
from paceline.gateway.sampling_intake import (
    SamplingWishes,
    check_prompt_logprobs,
    sampling_params,
    stop_automata,
    urgency_of,
)
from paceline.gateway.serving import Serving
from paceline.gateway.tenants import Tenant
from paceline.rpc.convert import calls_from_proto, finish_to_proto
from paceline.v1.generate_pb2 import GenerateRequest, GenerateResponse

_UNTRACED = Origin()


async def responses(
    serving: Serving,
    request: GenerateRequest,
    tenant: Tenant,
    deadline: Deadline,
    origin: Origin = _UNTRACED,
) -> AsyncGenerator[GenerateResponse, None]:
    """As they come. Raises PacelineError. Closing it ends the generation everywhere."""
    async with deadline.kept():
        job = await job_of(serving, request, tenant)
    task = asyncio.current_task()
    assert task is not None
    with serving.generation(
        job.model, tenant, task.cancel, deadline, origin, has_statistics=request.statistics
    ) as generation:
        generation.submit([job])
        while not generation.done:
            deltas = await generation.step()
            for num_left, (choice, delta) in zip(range(len(deltas))[::-1], deltas, strict=True):
                if delta.token_ids or delta.text or delta.finish or delta.prompt_logprobs:
                    is_last = generation.done and not num_left
                    yield _response(generation, choice, delta, is_last=is_last)


async def job_of(serving: Serving, request: GenerateRequest, tenant: Tenant) -> Job:
    """Raises PacelineError."""
    model = serving.model_or_only(request.model)
    wishes = _wishes(request)
    params = sampling_params(wishes, model)
    stops = stop_automata(wishes.stop, serving.config.limits.max_stop_strings)
    urgency = urgency_of(wishes, tenant)
    tokens = list(request.tokens.ids)
    content = tokens if request.WhichOneof("prompt") == "tokens" else request.text
    room = completion_room(model, wishes.max_tokens)
    owner = tenant.owner(request.cache_salt if request.HasField("cache_salt") else None)
    (prompt,) = await serving.prompts.of_contents([content], model, room, owner.salt)
    num_tokens = len(prompt.token_ids)
    limit = serving.config.limits.max_prompt_logprobs
    check_prompt_logprobs(params, num_tokens, limit, field="num_prompt_logprobs")
    max_tokens = room.max_tokens_after(num_tokens)
    params = dataclasses.replace(params, max_tokens=max_tokens)
    params = await serving.prompts.with_bad_words(params, wishes.bad_words, model)
    text = TextOptions(
        skips_special=request.skip_special_tokens or not request.HasField("skip_special_tokens"),
        shows_stop=request.include_stop_str_in_output,
    )
    return Job(model, owner, prompt, params, stops, urgency, text=text)


def _wishes(request: GenerateRequest) -> SamplingWishes:
    def given(name: str) -> bool:
        return request.HasField(name)

    for name in ("num_logprobs", "num_prompt_logprobs"):
        checked_count(name, getattr(request, name))
    return SamplingWishes(
        max_tokens=request.max_tokens if given("max_tokens") else None,
        min_tokens=request.min_tokens,
        temperature=request.temperature if given("temperature") else None,
        top_k=request.top_k,
        top_p=request.top_p if given("top_p") else None,
        seed=request.seed if given("seed") else None,
        n=request.n if given("n") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        num_logprobs=request.num_logprobs if given("num_logprobs") else None,
        priority=request.priority,
        ttft_ms=request.ttft_ms if given("ttft_ms") else None,
        itl_ms=request.itl_ms if given("itl_ms") else None,
        min_p=request.min_p,
        typical_p=request.typical_p if given("typical_p") else None,
        repetition_penalty=request.repetition_penalty if given("repetition_penalty") else None,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        bad_words=tuple(request.bad_words),
        bad_token_ids=tuple(tuple(word.ids) for word in request.bad_token_ids),
        num_prompt_logprobs=request.num_prompt_logprobs if given("num_prompt_logprobs") else None,
        logits_processors=calls_from_proto(request.logits_processors),
    )


def _response(
    generation: Generation, choice: Choice, delta: Delta, *, is_last: bool
) -> GenerateResponse:
    return GenerateResponse(
        choice=choice.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        finish=finish_to_proto(delta.finish),
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=generation.num_cached_tokens,
        prompt_logprobs=delta.prompt_logprobs,
        statistics=generation.statistics if is_last else None,
    )
