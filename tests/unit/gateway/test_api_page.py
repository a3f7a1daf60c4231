"""docs/api.md says what the code does: fields, defaults, limits."""

import asyncio
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core import sampling
from paceline.core.config import settings_of
from paceline.core.sampling import SamplingParams
from paceline.gateway.completions import DEFAULT_MAX_TOKENS
from paceline.gateway.config import GatewayConfig
from paceline.gateway.http_limits import MAX_HEAD_BYTES
from paceline.gateway.openai_types import (
    CHAT_NEUTRAL,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    _Ignored,
)
from paceline.router.config import RouterConfig
from paceline.v1.generate_pb2 import EmbedRequest, GenerateRequest
from tests.support.gateway_deployment import Deployment

PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()
ELSEWHERE = ("seed", "max_tokens", "num_logprobs", "num_prompt_logprobs")  # not SamplingParams
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "Mi": 1 << 20, "MiB": 1 << 20}


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    lines = section(title).splitlines()
    cells = [line[1:-1].split("|") for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells[1:]]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([\w-]+)`", text))


def test_every_field_is_served_ignored_or_refused() -> None:
    chat, completion = set(ChatRequest.__struct_fields__), set(CompletionRequest.__struct_fields__)
    found: dict[str, set[str]] = {"served": set(), "ignored": set(), "refused": set()}
    for row in rows("Request fields"):
        kind = next((word for word in ("ignored", "refused") if row[1].startswith(word)), "served")
        found[kind] |= names(row[0])
    served = {name for name in found["served"] if not name.startswith("num_")}
    assert found["ignored"] == set(_Ignored.__struct_fields__)
    assert found["refused"] == set(CHAT_NEUTRAL)
    assert served == (chat | completion) - found["ignored"] - set(NEUTRAL)


def test_every_field_of_embeddings_is_named() -> None:
    heads = [row[0] for row in rows("Embeddings")]
    served = {name for head in heads for name in names(head)}
    assert served | set(_Ignored.__struct_fields__) == set(EmbeddingRequest.__struct_fields__)
    over_grpc = {name for head in heads if "HTTP" not in head for name in names(head)}
    fields = set(EmbedRequest.DESCRIPTOR.fields_by_name)
    assert {"inputs" if name == "input" else name for name in over_grpc} == fields


def test_grpc_has_every_served_field_or_the_page_says_not() -> None:
    own = {
        "prompt": "text",
        "logprobs": "num_logprobs",
        "prompt_logprobs": "num_prompt_logprobs",
    }
    absent = {"stream", "stream_options"}  # it always streams, with the counts
    fields = set(GenerateRequest.DESCRIPTOR.fields_by_name)
    for row in served_rows():
        if not re.search(r"\((chat|completions)\)|not over gRPC", " ".join(row)):
            for name in names(row[0]) - absent:
                assert own.get(name, name) in fields, name


def served_rows() -> list[list[str]]:
    return [row for row in rows("Request fields") if not row[1].startswith(("ignored", "refused"))]


def test_defaults_are_those_of_the_code() -> None:
    params = SamplingParams()
    for row in served_rows():
        for name in names(row[0]):
            default = getattr(params, name, None)
            if default is False:
                assert row[1] == "false"
            elif isinstance(default, int | float) and name not in ELSEWHERE:
                assert float(row[1].split(":")[0]) == default, name


def test_bounds_are_those_of_the_code() -> None:
    phrases = (
        f"completions, gRPC: {DEFAULT_MAX_TOKENS};",
        f"1 to {sampling.MAX_CHOICES}; with several prompts {sampling.MAX_CHOICES} choices",
        f"-{sampling.MAX_PENALTY:g} to {sampling.MAX_PENALTY:g}",
        f"at most {sampling.MAX_BIASES} token ids, -{sampling.MAX_BIAS:g} to {sampling.MAX_BIAS:g}",
        f"at most {sampling.MAX_BAD_WORDS} words of 1 to {sampling.MAX_WORD_CHARS} characters",
        f"at most {sampling.MAX_BAD_WORD_TOKENS} tokens",
        f"at most {sampling.MAX_PROCESSORS} that the operator registered",
        f"of 1 to {sampling.MAX_STOP_CHARS} characters",
        f"at most {sampling.MAX_STOP_TOKEN_IDS} |",
        f"0 to {sampling.MAX_TOP_LOGPROBS}",
    )
    for phrase in phrases:
        assert phrase in section("Request fields")
    assert f"at most {sampling.MAX_BAD_SEQUENCES} sequences in all" in section("Sampling")


def limit(row: list[str], index: int) -> int:
    """The index-th number of a row's limit, with its unit."""
    found = re.findall(r"(\d+) ?(MiB|KiB|Mi|s)?\b", row[1])
    number, unit = found[index]
    return int(number) * UNITS[unit]


def test_limits_are_those_of_the_code() -> None:
    documented = set()
    for row in rows("Limits"):
        config = RouterConfig if row[3].startswith("router") else GatewayConfig
        fields = {item.name: item.default for item in settings_of(config)}
        for index, option in enumerate(re.findall(r"`--([\w-]+)`", row[3])):
            name = option.replace("-", "_")
            assert limit(row, index) == fields[name], name
            documented.add(name)
        if row[0] == "its head":
            assert limit(row, 0) == MAX_HEAD_BYTES
    settings = {item.name for item in settings_of(GatewayConfig)}
    limits = {name for name in settings if re.search("max_|timeout|keep_alive", name)}
    assert limits <= documented


async def run_python(program: str) -> str:
    """What it prints; an event loop, on which its server runs, goes on meanwhile.

    Not by the event loop: uvloop forks, which gRPC's handlers do not always survive."""
    command = [sys.executable, "-c", program]
    run = functools.partial(subprocess.run, stdout=subprocess.PIPE, check=True, timeout=30)
    return str((await asyncio.to_thread(run, command)).stdout, "utf-8")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_examples_run(deployment: Deployment) -> None:
    programs = re.findall(r"```python\n(.*?)```", section("Examples"), re.DOTALL)
    assert len(programs) == 3
    for program in programs:
        assert len(program.strip().splitlines()) - program.count("\n\n") <= 6
        for old, new in (
            ("127.0.0.1:8000", f"127.0.0.1:{deployment.port}"),
            ("127.0.0.1:8001", f"127.0.0.1:{deployment.gateway.grpc_port}"),
            ("SmolLM2-135M-Instruct", "mock"),
        ):
            program = program.replace(old, new)
        assert (await run_python(program)).strip() == "Hello"


@pytest.mark.asyncio(loop_scope="module")
async def test_routes_that_are_said_to_be_absent_are(deployment: Deployment) -> None:
    absent = PAGE.split("Any other route")[1].split("\n## ")[0]
    routes = re.findall(r"`(/v1/[^`]+)`", absent)
    assert "/v1/responses" in routes
    for route in routes:
        answer = await deployment.http.post(route.replace("…", "x"), json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
