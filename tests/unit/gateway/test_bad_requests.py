"""Every bad input: a clear 4xx in OpenAI's form, and nothing else disturbed."""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_client import raw_request, request_bytes
from tests.support.gateway_deployment import CONTEXT_LENGTH, Deployment, model_info
from tests.support.waits import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "mock", "messages": [USER], **fields}).encode()


def complete(**fields: Any) -> bytes:
    return json.dumps({"model": "mock", "prompt": "Hi", **fields}).encode()


def with_message(**fields: Any) -> bytes:
    return chat(messages=[{**USER, **fields}])


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


DEEP = b"[" * 200_000 + b"]" * 200_000
TOO_LONG = "x" * (CONTEXT_LENGTH + 1)
FITS = "must fit in 64 bits"


def integer(path: str, field: str, digits: int) -> bytes:
    body = chat() if path == CHAT else complete()
    return body[:-1] + f',"{field}":{"9" * digits}}}'.encode()


# name: (path, body, param, what the message says)
CASES: dict[str, tuple[str, bytes, str | None, str]] = {
    # https://github.com/vllm-project/vllm/issues/7632
    "empty prompt": (COMPLETIONS, complete(prompt=""), "prompt", "must not be empty"),
    "no prompts": (COMPLETIONS, complete(prompt=[]), "prompt", "must not be empty"),
    "empty ids": (COMPLETIONS, complete(prompt=[[]]), "prompt", "must not be empty"),
    "an empty prompt of one": (COMPLETIONS, complete(prompt=[""]), "prompt", "must not be empty"),
    "one empty prompt": (COMPLETIONS, complete(prompt=["a", ""]), "prompt", "must not be empty"),
    "negative id": (COMPLETIONS, complete(prompt=[-1]), "prompt", "between 0 and 259"),
    "id of no token": (COMPLETIONS, complete(prompt=[260]), "prompt", "between 0 and 259"),
    "huge id": (COMPLETIONS, complete(prompt=[2**70]), "prompt", FITS),
    "huge id of several": (COMPLETIONS, complete(prompt=[[1, 2**63]]), "prompt", FITS),
    "special only": (COMPLETIONS, complete(prompt="<|end|>"), "prompt", "special tokens"),
    "special id only": (COMPLETIONS, complete(prompt=[256, 257]), "prompt", "special tokens"),
    "mixed prompts": (COMPLETIONS, complete(prompt=["a", 1]), "prompt", "mixture"),
    "33 prompts": (COMPLETIONS, complete(prompt=["a"] * 33), "prompt", "at most 32"),
    "prompt beyond the context": (COMPLETIONS, complete(prompt=TOO_LONG), "prompt", "context"),
    "echo of a chat": (CHAT, chat(echo=True), "echo", "is not supported"),
    "suffix": (COMPLETIONS, complete(suffix="x"), "suffix", "is not supported"),
    "no beam search": (
        COMPLETIONS,
        complete(use_beam_search=0),
        "use_beam_search",
        "is not supported",
    ),
    "no length penalty": (CHAT, chat(length_penalty=True), "length_penalty", "is not supported"),
    "best_of of a chat": (CHAT, chat(best_of=2), "best_of", "is not supported"),
    "best_of below n": (COMPLETIONS, complete(best_of=2, n=3), "best_of", "between n, which is 3"),
    "best_of 129": (COMPLETIONS, complete(best_of=129), "best_of", "and 128"),
    "best_of of n 0": (COMPLETIONS, complete(best_of=2, n=0), "n", "at least 1"),
    "best_of 100 of 2": (
        COMPLETIONS,
        complete(prompt=["a", "b"], best_of=100),
        "best_of",
        "128 choices",
    ),
    "best_of in a stream": (COMPLETIONS, complete(best_of=2, stream=True), "best_of", "stream"),
    "no output without echo": (COMPLETIONS, complete(max_tokens=0), "max_tokens", "at least 1"),
    "long echo with logprobs": (
        COMPLETIONS,
        complete(prompt=["x" * 200] * 32, echo=True, logprobs=20, n=4),
        "logprobs",
        "at most 262144",
    ),
    "both ends of a chat": (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
        "excludes",
    ),
    "negative logprobs": (COMPLETIONS, complete(logprobs=-1), "logprobs", "negative"),
    "logprobs 21": (COMPLETIONS, complete(logprobs=21), "logprobs", "between 0 and 20"),
    "chat beyond the context": (CHAT, with_message(content=TOO_LONG), "messages", "context"),
    "max_tokens 0": (CHAT, chat(max_tokens=0), "max_tokens", "at least 1"),
    "max_tokens negative": (CHAT, chat(max_tokens=-1), "max_tokens", "at least 1"),
    "max_tokens huge": (CHAT, chat(max_tokens=2**63 - 1), "max_tokens", "at most"),
    **{
        f"{digits} digits in {field}": (path, integer(path, field, digits), field, FITS)
        for path, field in (
            *((CHAT, field) for field in ("n", "max_tokens", "max_completion_tokens", "top_k")),
            *((CHAT, field) for field in ("min_tokens", "priority", "prompt_logprobs")),
            *((CHAT, "top_logprobs"), (COMPLETIONS, "logprobs"), (COMPLETIONS, "max_tokens")),
        )
        for digits in (20, 400, 4300, 5000)
    },
    "4300 digits in seed": (CHAT, integer(CHAT, "seed", 4300), "seed", "64 bits"),
    "5000 digits in seed": (CHAT, integer(CHAT, "seed", 5000), "seed", "64 bits"),
    "4300 digits in best_of": (CHAT, integer(CHAT, "best_of", 4300), "best_of", "not supported"),
    "400 digits in temperature": (CHAT, integer(CHAT, "temperature", 400), "temperature", "range"),
    "huge stop token": (CHAT, chat(stop_token_ids=[2**64]), "stop_token_ids", FITS),
    "huge bias": (CHAT, chat(logit_bias={str(10**4000): 1}), "logit_bias", FITS),
    "max_completion_tokens 0": (
        CHAT,
        chat(max_completion_tokens=0),
        "max_completion_tokens",
        "=0: must be at least 1",
    ),
    "min_tokens above": (CHAT, chat(min_tokens=9, max_tokens=8), "min_tokens", "which is 8"),
    "temperature NaN": (
        CHAT,
        chat(temperature=float("nan")),
        "temperature",
        "='NaN': is no number",
    ),
    "temperature Infinity": (
        CHAT,
        chat(temperature=float("inf")),
        "temperature",
        "='Infinity': is",
    ),
    "temperature -Infinity": (CHAT, chat(temperature=float("-inf")), "temperature", "='-Infinity'"),
    "NaN in a text of what is no JSON": (
        CHAT,
        b'{"model": "\\"temperature\\": NaN", }',
        None,
        "not valid",
    ),
    "temperature 1e999": (CHAT, chat()[:-1] + b',"temperature":1e999}', "temperature", "range"),
    "temperature negative": (CHAT, chat(temperature=-0.1), "temperature", "between 0 and"),
    "top_p 0": (CHAT, chat(top_p=0), "top_p", "(0, 1]"),
    "top_p 2": (CHAT, chat(top_p=2), "top_p", "(0, 1]"),
    "top_k negative": (CHAT, chat(top_k=-2), "top_k", "positive"),
    "n 0": (CHAT, chat(n=0), "n", "between 1 and 128"),
    "n 1000": (CHAT, chat(n=1000), "n", "between 1 and 128"),
    "n 100 of 2": (COMPLETIONS, complete(prompt=["a", "b"], n=100), "n", "128 choices"),
    "100 stop strings": (CHAT, chat(stop=["s"] * 100), "stop", "at most 4"),
    # https://github.com/vllm-project/vllm refuses it, too: "stop cannot contain an empty string"
    "empty stop string": (CHAT, chat(stop=""), "stop", "between 1 and 1024"),
    "an empty stop string": (CHAT, chat(stop=["a", ""]), "stop", "between 1 and 1024"),
    "no stop text": (COMPLETIONS, complete(stop=""), "stop", "between 1 and 1024"),
    "long stop string": (CHAT, chat(stop="s" * 2000), "stop", "between 1 and 1024"),
    "stop token beyond": (CHAT, chat(stop_token_ids=[999]), "stop_token_ids", "between 0 and"),
    "seed huge": (CHAT, chat(seed=2**64), "seed", "64 bits"),
    "priority huge": (CHAT, chat(priority=2**31), "priority", "32 bits"),
    "top_logprobs 21": (
        CHAT,
        chat(logprobs=True, top_logprobs=21),
        "top_logprobs",
        "between 0 and 20",
    ),
    "negative top_logprobs": (
        CHAT,
        chat(logprobs=True, top_logprobs=-1),
        "top_logprobs",
        "between 0 and 20",
    ),
    "top_logprobs alone": (CHAT, chat(top_logprobs=2), "top_logprobs", "logprobs is true"),
    "stream_options alone": (CHAT, chat(stream_options={}), "stream_options", "stream is true"),
    "unknown model": (CHAT, chat(model="gpt-none"), "model", "does not exist"),
    "no model": (CHAT, b'{"messages":[]}', "model", "Missing required parameter: 'model'"),
    "no messages": (CHAT, b'{"model":"mock"}', "messages", "Missing required parameter"),
    "unknown field": (CHAT, chat(temprature=1), "temprature", "Unrecognized request argument"),
    "model as number": (CHAT, chat(model=5), "model", "Expected `str`"),
    "max_tokens as text": (CHAT, chat(max_tokens="5"), "max_tokens", "Expected `int"),
    "max_tokens as float": (CHAT, chat(max_tokens=1.5), "max_tokens", "Expected `int"),
    "stream as text": (CHAT, chat(stream="yes"), "stream", "Expected `bool"),
    "messages as text": (CHAT, chat(messages="Hi"), "messages", "Expected `array`"),
    "prompt as object": (COMPLETIONS, complete(prompt={}), "prompt", "Expected"),
    "temperature as bool": (CHAT, chat(temperature=True), "temperature", "Expected `float"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), "tools", "is not supported"),
    "json mode": (
        CHAT,
        chat(response_format={"type": "json_object"}),
        "response_format",
        "is not supported",
    ),
    "min_p above": (CHAT, chat(min_p=1.5), "min_p", "[0, 1]"),
    "typical_p 0": (CHAT, chat(typical_p=0), "typical_p", "(0, 1]"),
    "presence above": (CHAT, chat(presence_penalty=2.5), "presence_penalty", "[-2, 2]"),
    "frequency below": (CHAT, chat(frequency_penalty=-3), "frequency_penalty", "[-2, 2]"),
    "repetition 0": (CHAT, chat(repetition_penalty=0), "repetition_penalty", "must lie between"),
    "bias above": (CHAT, chat(logit_bias={"5": 101}), "logit_bias", "[-100, 100]"),
    "bias of no token": (CHAT, chat(logit_bias={"260": 1}), "logit_bias", "between 0 and 259"),
    "bias of a word": (CHAT, chat(logit_bias={"cat": 1}), "logit_bias", "Expected `int`"),
    "bias as text": (CHAT, chat(logit_bias={"5": "1"}), "logit_bias[...]", "Expected `float`"),
    "bad word empty": (CHAT, chat(bad_words=[" "]), "bad_words", "between 1 and 256"),
    "bad word long": (CHAT, chat(bad_words=["x" * 65]), "bad_words", "1 to 64 tokens"),
    "300 bad words": (CHAT, chat(bad_words=["x"] * 300), "bad_words", "at most 256"),
    "prompt_logprobs 21": (CHAT, chat(prompt_logprobs=21), "prompt_logprobs", "between 0 and 20"),
    "all prompt_logprobs": (CHAT, chat(prompt_logprobs=-1), "prompt_logprobs", "negative"),
    "prompt_logprobs of a stream": (
        CHAT,
        chat(prompt_logprobs=1, stream=True),
        "prompt_logprobs",
        "stream is true",
    ),
    "processor by code": (
        CHAT,
        chat(logits_processors=[{"qualname": "os.system", "args": ["true"]}]),
        "qualname",
        "Unrecognized",
    ),
    "processor with a list": (
        CHAT,
        chat(logits_processors=[{"name": "x", "arguments": []}]),
        "logits_processors",
        "JSON object",
    ),
    "processor with invalid UTF-8": (
        CHAT,
        chat()[:-1] + b',"logits_processors":[{"name":"x","arguments":{"a":"\xff"}}]}',
        "logits_processors",
        "valid UTF-8",
    ),
    "processor with 5000 digits": (
        CHAT,
        chat()[:-1] + b',"logits_processors":[{"name":"x","arguments":{"a":%b}}]}' % (b"9" * 5000),
        "logits_processors",
        "JSON object",
    ),
    # https://github.com/janhq/jan/issues/6254
    "messages empty": (CHAT, chat(messages=[]), "messages", "must not be empty"),
    "long unknown field": (CHAT, chat(**{"x" * 900_000: 1}), "x" * 100, "Unrecognized"),
    "long role": (CHAT, with_message(role="r" * 900_000), "messages[0].role", "Invalid enum"),
    "unknown role": (CHAT, with_message(role="robot"), "messages[0].role", "robot"),
    "content null": (CHAT, with_message(content=None), "messages[0].content", "must be a string"),
    "content empty": (CHAT, with_message(content=[]), "messages[0].content", "must be a string"),
    "tool without call": (CHAT, with_message(role="tool"), "messages[0].tool_call_id", "no m"),
    "function": (CHAT, with_message(role="function"), "messages[0].role", "tool_calls"),
    "call of a user": (
        CHAT,
        with_message(tool_calls=[call("{}")]),
        "messages[0].tool_calls",
        "only an assistant",
    ),
    **{
        f"call with {arguments[:9]}": (
            CHAT,
            with_message(role="assistant", tool_calls=[call(arguments)]),
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        )
        for arguments in ("", "{", "[]", "null", "[" * 100_000)
    },
    "image": (
        CHAT,
        with_message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type",
        "only text",
    ),
    # https://github.com/openai/tiktoken/issues/82
    "lone high surrogate": (CHAT, chat()[:-1] + b',"user":"\\ud83d"}', None, "not valid JSON"),
    "lone low surrogate": (CHAT, chat()[:-1] + b',"user":"a\\udc00b"}', None, "not valid JSON"),
    "invalid UTF-8": (CHAT, chat()[:-1] + b',"user":"\xff"}', None, "not valid JSON"),
    "byte order mark": (CHAT, b"\xef\xbb\xbf" + chat(), None, "not valid JSON"),
    "deep JSON": (CHAT, b'{"user":' + DEEP + b"}", None, "nested too deeply"),
    "deep messages": (CHAT, b'{"messages":' + DEEP + b"}", "messages[0]", "Expected `object`"),
    "empty body": (CHAT, b"", None, "not valid JSON"),
    "half a body": (CHAT, chat()[:-5], None, "not valid JSON"),
    "an array": (CHAT, b"[1]", None, "Expected `object`"),
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("name", CASES)
async def test_a_bad_request_gets_a_clear_answer(deployment: Deployment, name: str) -> None:
    path, body, param, message = CASES[name]
    deployment.router.reply = lambda request: bytes_reply(b"undisturbed", interval_s=0.002)
    good = asyncio.create_task(deployment.chat("good"))
    headers = {"content-type": "application/json"}
    response = await deployment.http.post(path, content=body, headers=headers)
    assert response.status_code == (404 if name == "unknown model" else 400), response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert message in error["message"] and len(error["message"]) < 300
    assert (await good).json()["choices"][0]["message"]["content"] == "undisturbed"
    assert len(deployment.router.submissions) == 1  # nothing of the bad one was sent


BAD_PATTERNS = {
    "[": "[",
    "unfinished group": "(?P<x",
    "1 MB": "a" * 1_000_000,
    "nested": "(a|a)*b" * 30,
    "look-behind": "(?<=a)b",
}


@pytest.mark.parametrize("pattern", BAD_PATTERNS)
async def test_vllm_17313_no_regular_expression_hurts(deployment: Deployment, pattern: str) -> None:
    """https://github.com/vllm-project/vllm/issues/17313: 400 in less than 2 s, nothing is sent to a
    worker. Whatever the pattern: there is no structured output yet."""
    regex = BAD_PATTERNS[pattern]
    for field, value in (
        ("guided_regex", regex),
        ("structured_outputs", {"regex": regex}),
        ("response_format", {"type": "regex", "regex": regex}),
    ):
        started = time.monotonic()
        answer = await deployment.chat(**{field: value})
        assert time.monotonic() - started < 2
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field and len(answer.text) < 500
    assert not deployment.router.submissions


@pytest.mark.parametrize("declared", [True, False])
async def test_10_mb_are_refused_while_they_arrive(deployment: Deployment, declared: bool) -> None:
    body = b'{"user":"' + b"x" * (10 << 20)

    async def pieces() -> Any:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    content = body if declared else pieces()
    response = await deployment.http.post(CHAT, content=content)
    assert response.status_code == 413
    assert "1048576 bytes" in response.json()["error"]["message"]


async def test_a_declared_length_is_refused_before_the_body(deployment: Deployment) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10485760\r\n\r\n".encode()
    status, headers, body = await asyncio.wait_for(raw_request(deployment.port, head), 1)
    assert status == 413 and headers["connection"] == "close" and b"must not exceed" in body


async def test_unknown_routes_and_methods_have_openai_bodies(deployment: Deployment) -> None:
    missing = await deployment.http.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = await deployment.http.get(CHAT)
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


async def test_tiktoken_82_odd_but_valid_text_arrives_unchanged(deployment: Deployment) -> None:
    """https://github.com/openai/tiktoken/issues/82"""
    deployment.router.set_models([model_info(deployment.model_dir, context_length=1 << 16)])
    await until(lambda: deployment.gateway.serving.models()[0].context_length == 1 << 16)
    for text in ("\U0001f600", "a\0b", "\ufeffx", "e" + "\u0301" * 10_000):
        body = complete(prompt=text)  # pairs of surrogates: the six characters of each escape
        assert (await deployment.http.post(COMPLETIONS, content=body)).status_code == 200
        sent = bytes(deployment.router.submissions[-1].request.token_ids)
        assert sent == text.encode()
    deployment.router.set_models([model_info(deployment.model_dir)])
    await until(lambda: deployment.gateway.serving.models()[0].context_length == CONTEXT_LENGTH)


async def test_jan_6254_role_orders_are_the_templates_matter(deployment: Deployment) -> None:
    """https://github.com/janhq/jan/issues/6254: this template, like SmolLM2's, takes any order."""
    for roles in (["system", "user", "user"], ["assistant"], ["assistant", "user"], ["developer"]):
        messages = [{"role": role, "content": "x"} for role in roles]
        body = {"model": "mock", "messages": messages}
        assert (await deployment.http.post(CHAT, json=body)).status_code == 200


async def test_a_request_without_content_type_or_length_is_fine(deployment: Deployment) -> None:
    request = request_bytes(CHAT, chat(max_tokens=5))
    status, _, body = await raw_request(deployment.port, request)
    assert status == 200 and b"Hello" in body
