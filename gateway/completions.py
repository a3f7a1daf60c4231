"""POST /v1/completions: one or many prompts, as text or token ids, to one job each."""

import dataclasses

import msgspec

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import MAX_CHOICES, SamplingParams
from paceline.gateway.answer import AnswerHead
from paceline.gateway.completion_answer import CompletionAnswer
from paceline.gateway.jobs import Job, Prompt, make_prompt
from paceline.gateway.openai_types import CompletionRequest
from paceline.gateway.prepared import PreparedRequest, answer_options, wishes_of
from paceline.gateway.prompt_logprobs import PromptLogprobsText
from paceline.gateway.sampling_intake import (
    checked_priority,
    fit_context,
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
    params = await sampling_params(wishes, model, serving.text)
    stops = stop_automata(wishes.stop, serving.config.max_stop_strings)
    prompts = _prompts(request.prompt, serving.config.max_prompts)
    if len(prompts) * params.n > MAX_CHOICES:  # of all prompts together
        reason = f"with {len(prompts)} prompts there may be {MAX_CHOICES} choices in all"
        raise InvalidRequest("n", params.n, reason)
    template = Job(model, Prompt([], b"", b""), params, stops, checked_priority(wishes.priority))
    jobs = []
    for index, content in enumerate(prompts):
        prompt = await completion_prompt(serving, content, model)
        fitted = fit_completion(params, prompt, model, is_explicit=wishes.max_tokens is not None)
        first = index * params.n
        jobs.append(dataclasses.replace(template, prompt=prompt, params=fitted, first_choice=first))
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


async def completion_prompt(serving: Serving, content: str | list[int], model: ModelInfo) -> Prompt:
    """Raises InvalidRequest for a prompt without text, in words or in ids."""

    def encode() -> list[int]:
        if not content:
            raise InvalidRequest("prompt", content, "must not be empty")
        if isinstance(content, str):
            token_ids = serving.text.encode(content)
        else:
            token_ids = content
            _check_token_ids(token_ids, model)
        if serving.text.is_only_special(token_ids):
            raise InvalidRequest("prompt", content, "must hold more than special tokens")
        return token_ids

    return await make_prompt(encode, model, serving.config.secret)


def fit_completion(
    params: SamplingParams, prompt: Prompt, model: ModelInfo, *, is_explicit: bool
) -> SamplingParams:
    return fit_context(
        params,
        len(prompt.token_ids),
        model,
        prompt_field="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        is_explicit=is_explicit,
    )


def _check_token_ids(token_ids: list[int], model: ModelInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            reason = f"token ids must lie between 0 and {model.vocab_size - 1}"
            raise InvalidRequest("prompt", token_id, reason)


def _prompts(prompt: str | list[str | int | list[int]], max_prompts: int) -> list[str | list[int]]:
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
