"""POST /tokenize and /detokenize: what a request's prompt is in tokens, in vLLM's form."""

import msgspec
import orjson

from paceline.core.errors import InvalidRequest
from paceline.gateway.messages import chat_of
from paceline.gateway.openai_types import DetokenizeRequest, TokenizeRequest
from paceline.gateway.serving import Serving

TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(serving: Serving, request: TokenizeRequest) -> bytes:
    """{count, max_model_len, tokens, token_strs}. The same way as a request's prompt, so `count`
    is what is checked against the context. Raises PacelineError."""
    model = serving.model_or_only(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("prompt", request.prompt, "give either prompt or messages")
    if request.messages is not None:
        has_developer = serving.text.has_developer_role
        chat = chat_of(request.messages, request, has_developer=has_developer)
        ids = await serving.prompts.ids_of_chat(chat)
    else:
        _check_no_template(request)
        adds_special = request.add_special_tokens is not False
        ids = await serving.prompts.ids_of_text(request.prompt or "", adds_special=adds_special)

    def body() -> bytes:
        content = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids}
        names = serving.text.token_names(ids) if request.return_token_strs else None
        return orjson.dumps(content | {"token_strs": names})

    return await serving.prompts.work(body, len(ids))


async def detokenize(serving: Serving, request: DetokenizeRequest) -> bytes:
    """{prompt}: the text of these tokens, special ones included. No more of them than the context
    holds: whoever asks for more holds up others. Raises PacelineError."""
    model = serving.model_or_only(request.model)
    ids = request.tokens
    reason = f"must not be more than the {model.context_length} tokens of the context"
    InvalidRequest.check("tokens", len(ids), len(ids) <= model.context_length, reason)

    def body() -> bytes:
        reason = f"token ids must lie between 0 and {model.vocab_size - 1}"
        for token_id in (min(ids), max(ids)) if ids else ():
            InvalidRequest.check("tokens", token_id, 0 <= token_id < model.vocab_size, reason)
        return orjson.dumps({"prompt": serving.text.decode(ids)})

    return await serving.prompts.work(body, len(ids))


def _check_no_template(request: TokenizeRequest) -> None:
    for field in ("add_generation_prompt", "continue_final_message"):
        if (value := getattr(request, field)) is not None:
            raise InvalidRequest(field, value, "is only allowed with messages")
