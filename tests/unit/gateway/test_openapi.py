"""The OpenAPI document says what there is, and answers are what it says."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from paceline.gateway import answer_types as answers
from paceline.gateway.app import make_app
from paceline.gateway.http_limits import MAX_HEAD_BYTES
from paceline.gateway.openai_types import ChatRequest, CompletionRequest, EmbeddingRequest
from paceline.gateway.openapi import document
from paceline.v1.common_pb2 import ERROR_CODE_INTERNAL, Error
from tests.support.fake_router_service import Reply
from tests.support.gateway_client import sse_events
from tests.support.gateway_deployment import Deployment, gateway_config
from tests.support.key_file import entry, write

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERYTHING = {"x-paceline-timing": "1", "x-paceline-statistics": "1"}
EMBEDDED = {"model": "mock", "input": ["Hi", "Ho"]}
HI = [{"role": "user", "content": "Hi"}]


async def test_the_document_names_every_route(deployment: Deployment) -> None:
    served = (await deployment.http.get("/openapi.json")).json()
    routes = make_app(deployment.gateway.serving).routes
    found = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    said = {(path, method) for path, item in served["paths"].items() for method in item}
    assert said == found


async def test_what_a_body_may_hold_is_that_of_the_types_and_settings(model_dir: Path) -> None:
    limits = {"max_stop_strings": 3, "max_prompts": 5, "max_embedding_inputs": 7}
    config = gateway_config(model_dir, "x:1", **limits)
    schemas = document(config)["components"]["schemas"]
    embedding = schemas["EmbeddingRequest"]["properties"]
    assert set(embedding) == set(EmbeddingRequest.__struct_fields__)
    assert [form.get("maxItems") for form in embedding["input"]["anyOf"]] == [None, 7, None, 7]
    for kind in (ChatRequest, CompletionRequest):
        properties = schemas[kind.__name__]["properties"]
        assert set(properties) == set(kind.__struct_fields__)
        assert properties["suffix"]["enum"] == [None, ""]
        assert properties["n"]["anyOf"][0]["maximum"] == 128
        assert properties["stop"]["anyOf"][1]["maxItems"] == 3
    prompts = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert [form.get("maxItems") for form in prompts] == [None, 5, None, 5]
    assert '"says"' not in json.dumps(schemas)


async def test_keys_are_spoken_of_where_they_are_asked_for(model_dir: Path, tmp_path: Path) -> None:
    write(tmp_path / "keys.toml", entry("acme", ["sk-acme"]))
    open_one = document(gateway_config(model_dir, "x:1"))
    guarded = document(gateway_config(model_dir, "x:1", api_keys=tmp_path / "keys.toml"))
    for path, item in guarded["paths"].items():
        ((method, said),) = item.items()
        assert (
            ("401" in said["responses"])
            == bool(said["security"])
            == (path not in ("/livez", "/readyz", "/metrics"))
        )
        assert "401" not in open_one["paths"][path][method]["responses"]


ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "everything": {"logprobs": True, "top_logprobs": 2, "n": 2, "prompt_logprobs": 1},
}


def completion_fields(fields: dict[str, Any]) -> dict[str, Any]:
    fields = {**fields}
    if fields.pop("logprobs", False):
        fields["logprobs"] = fields.pop("top_logprobs")
    return {**fields, "prompt": ["Hi", "Ho"], "echo": True}


@pytest.mark.parametrize("name", ASKED)
async def test_answers_are_of_their_types(deployment: Deployment, name: str) -> None:
    fields = ASKED[name]
    kinds: list[tuple[str, dict[str, Any], type[answers.Shape], type[answers.Shape]]] = [
        (
            "/v1/chat/completions",
            {"messages": HI, **fields},
            answers.ChatCompletion,
            answers.ChatCompletionChunk,
        ),
        (
            "/v1/completions",
            completion_fields(fields),
            answers.Completion,
            answers.CompletionChunk,
        ),
    ]
    headers = {} if name == "plain" else EVERYTHING
    for path, body, whole, chunk in kinds:
        body["model"] = "mock"
        answer = await deployment.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        msgspec.json.decode(answer.content, type=whole)
        body.pop("prompt_logprobs", None)
        body |= {"stream": True, "stream_options": {"include_usage": name != "plain"}}
        *frames, done = sse_events(
            (await deployment.http.post(path, json=body, headers=headers)).text
        )
        assert done == "[DONE]" and len(frames) > 2
        for frame in frames:
            msgspec.convert(frame, type=chunk)


async def test_other_answers_and_errors_are_of_their_types(deployment: Deployment) -> None:
    get, post = deployment.http.get, deployment.http.post
    text = {"prompt": "Hi", "return_token_strs": True}
    cases: list[tuple[Any, type[answers.Shape]]] = [
        (await get("/v1/models"), answers.ModelList),
        (await get("/v1/models/mock"), answers.ModelCard),
        (await get("/v1/models/none"), answers.ErrorBody),
        (await get("/v1/none"), answers.ErrorBody),
        (await post("/v1/embeddings", json=EMBEDDED), answers.EmbeddingList),
        (
            await post("/v1/embeddings", json={**EMBEDDED, "encoding_format": "base64"}),
            answers.EmbeddingList,
        ),
        (await post("/tokenize", json=text), answers.Tokens),
        (await post("/detokenize", json={"tokens": [72]}), answers.DetokenizedText),
        (await post("/v1/completions", json={}), answers.ErrorBody),
        (await get("/livez", headers={"a": "b" * 2 * MAX_HEAD_BYTES}), answers.ErrorBody),
    ]
    for answer, kind in cases:
        msgspec.json.decode(answer.content, type=kind)
    error = Error(code=ERROR_CODE_INTERNAL, message="it broke")
    deployment.router.reply = lambda request: Reply([[97]], error=error)
    stream = await deployment.complete(stream=True)
    msgspec.convert(sse_events(stream.text)[-2], type=answers.ErrorBody)
