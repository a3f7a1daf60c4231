"""POST /v1/completions: one or many prompts, as text or token ids, to one job each."""

import dataclasses

import msgspec

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import MAX_CHOICES
from paceline.gateway.answer import AnswerHead
from paceline.gateway.completion_answer import CompletionAnswer
from paceline.gateway.context_room import ContextRoom
from paceline.gateway.jobs import Job
from paceline.gateway.openai_types import CompletionRequest
from paceline.gateway.prepared import PreparedRequest, answer_options, wishes_of
from paceline.gateway.prompt_logprobs import PromptLogprobsText
from paceline.gateway.prompts import Content
from paceline.gateway.sampling_intake import (
    check_logprobs,
    check_prompt_logprobs,
    checked_priority,
    sampling_params,
    stop_automata,
)
from paceline.gateway.serving import Serving
from paceline.v1.control_pb2 import ModelInfo

DECODER = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16


async def prepare_completion(
    serving: Serving, request: CompletionRequest, *, has_timing: bool
) -> PreparedRequest:
    """Raises PacelineError; nothing has been sent to the router then."""
    model = serving.model(request.model)
    options = answer_options(request, has_timing=has_timing)
    wishes = wishes_of(request, request.max_tokens, request.logprobs)
    params = sampling_params(wishes, model)
    stops = stop_automata(wishes.stop, serving.config.max_stop_strings)
    priority = checked_priority(wishes.priority)
    contents = _contents(request.prompt, serving.config.max_prompts)
    if len(contents) * params.n > MAX_CHOICES:  # of all prompts together
        reason = f"with {len(contents)} prompts there may be {MAX_CHOICES} choices in all"
        raise InvalidRequest("n", params.n, reason)
    room = completion_room(model, wishes.max_tokens)
    prompts = await serving.prompts.of_contents(contents, model, room)
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    limit = serving.config.max_prompt_logprobs
    check_prompt_logprobs(params, num_tokens, limit, num_copies=params.n)
    params = await serving.prompts.with_bad_words(params, wishes.bad_words, model)
    jobs = []
    for index, prompt in enumerate(prompts):
        max_tokens = room.max_tokens_after(len(prompt.token_ids))
        fitted = dataclasses.replace(params, max_tokens=max_tokens)
        jobs.append(Job(model, prompt, fitted, stops, priority, first_choice=index * params.n))
    if not request.stream:
        num_tokens = sum(job.params.n * job.params.max_tokens for job in jobs)
        check_logprobs("logprobs", params, num_tokens, serving.config.max_answer_logprobs)
    answer = CompletionAnswer(
        AnswerHead("cmpl", model.name),
        len(jobs) * params.n,
        serving.text.token_bytes if params.num_logprobs >= 0 else None,
        [
            PromptLogprobsText(serving.text.token_bytes)
            for _ in jobs
            if params.num_prompt_logprobs >= 0
        ],
        has_usage=options.has_usage,
        has_timing=options.has_timing,
    )
    return PreparedRequest(model, jobs, answer, bool(request.stream))


def completion_room(model: ModelInfo, max_tokens: int | None) -> ContextRoom:
    return ContextRoom(model.context_length, "prompt", max_tokens, DEFAULT_MAX_TOKENS)


def _contents(prompt: str | list[str | int | list[int]], max_prompts: int) -> list[Content]:
    """The four forms that OpenAI's API allows, as a list of texts or id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt", prompt, "must not be empty")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if ids or len({type(item) for item in prompts}) > 1:
        reason = "must be a text, texts, token ids or lists of token ids, not a mixture"
        raise InvalidRequest("prompt", prompt, reason)
    if len(prompts) > max_prompts:
        raise InvalidRequest("prompt", f"{len(prompts)} prompts", f"at most {max_prompts} prompts")
    return prompts
