"""POST /v1/chat/completions: messages through the model's template to one job."""

import dataclasses

import msgspec

from paceline.core.errors import InvalidRequest
from paceline.gateway.answer import AnswerHead
from paceline.gateway.chat_answer import ChatAnswer
from paceline.gateway.context_room import ContextRoom
from paceline.gateway.jobs import Job
from paceline.gateway.logprobs import checked_count
from paceline.gateway.messages import chat_of
from paceline.gateway.openai_types import ChatRequest
from paceline.gateway.prepared import (
    Caller,
    PreparedRequest,
    answer_options,
    text_options,
    wishes_of,
)
from paceline.gateway.prompt_logprobs import PromptLogprobsText
from paceline.gateway.sampling_intake import (
    check_logprobs,
    check_prompt_logprobs,
    sampling_params,
    stop_automata,
    urgency_of,
)
from paceline.gateway.serving import Serving

DECODER = msgspec.json.Decoder(ChatRequest)


async def prepare_chat(serving: Serving, request: ChatRequest, caller: Caller) -> PreparedRequest:
    """Raises PacelineError; nothing has been sent to the router then."""
    model = serving.model(request.model)
    options = answer_options(request, caller)
    max_tokens = _max_tokens(request)
    wishes = wishes_of(request, max_tokens, _num_logprobs(request))
    params = sampling_params(wishes, model)
    stops = stop_automata(wishes.stop, serving.config.limits.max_stop_strings)
    urgency = urgency_of(wishes, caller.tenant)
    chat = chat_of(request.messages, request, has_developer=serving.text.has_developer_role)
    room = ContextRoom(model.context_length, "messages", max_tokens)
    owner = caller.tenant.owner(request.cache_salt)
    prompt = await serving.prompts.of_chat(chat, model, room, owner.salt)
    check_prompt_logprobs(params, len(prompt.token_ids), serving.config.limits.max_prompt_logprobs)
    max_tokens = room.max_tokens_after(len(prompt.token_ids))
    params = dataclasses.replace(params, max_tokens=max_tokens)
    params = await serving.prompts.with_bad_words(params, wishes.bad_words, model)
    if not request.stream:
        limit = serving.config.limits.max_answer_logprobs
        check_logprobs("top_logprobs", params, params.n * max_tokens, limit)
    answer = ChatAnswer(
        AnswerHead("chatcmpl", model.name),
        params.n,
        serving.text.token_bytes if params.num_logprobs >= 0 else None,
        PromptLogprobsText(serving.text.token_bytes) if params.num_prompt_logprobs >= 0 else None,
        has_usage=options.has_usage,
        has_timing=options.has_timing,
    )
    job = Job(model, owner, prompt, params, stops, urgency, text=text_options(request))
    return PreparedRequest(model, [job], answer, bool(request.stream), caller)


def _max_tokens(request: ChatRequest) -> int | None:
    """By its newer name where both are given."""
    newer = request.max_completion_tokens
    if newer is None:
        return request.max_tokens
    InvalidRequest.check("max_completion_tokens", newer, newer >= 1, "must be at least 1")
    return newer


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return checked_count("top_logprobs", request.top_logprobs or 0)
    if request.top_logprobs:
        reason = "is only allowed when logprobs is true"
        raise InvalidRequest("top_logprobs", request.top_logprobs, reason)
    return None
