"""A checked request in tokens, ready to be sent to a router."""

import secrets
from dataclasses import dataclass

from paceline.core.pooling import Pooling
from paceline.core.sampling import SamplingParams
from paceline.core.targets import NO_TARGETS, LatencyTargets
from paceline.gateway.stop_strings import StopAutomaton
from paceline.rpc.convert import pooling_to_proto, sampling_to_proto
from paceline.v1.common_pb2 import TokenRequest
from paceline.v1.control_pb2 import ModelInfo


@dataclass(frozen=True, slots=True)
class KvOwner:
    """Whose KV a request's is: a tenant's, or that of its requests with one `cache_salt`."""

    tenant: str
    cache_salt: str | None
    salt: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    root_key: bytes
    block_keys: bytes  # 32 bytes a full block


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text: a matter of the gateway alone."""

    skips_special: bool = True  # tokens
    shows_stop: bool = False  # strings and tokens at which a text ends


@dataclass(frozen=True, slots=True)
class Urgency:
    """When a request is wanted, beside others."""

    priority: int = 0  # the smaller runs first
    targets: LatencyTargets = NO_TARGETS
    weight: float = 1.0  # of its tenant


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its n choices; `first_choice` is where they stand in the response."""

    model: ModelInfo
    owner: KvOwner
    prompt: Prompt
    params: SamplingParams
    stops: tuple[StopAutomaton, ...]
    urgency: Urgency = Urgency()
    first_choice: int = 0
    text: TextOptions = TextOptions()


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """One input of a request for embeddings."""

    model: ModelInfo
    owner: KvOwner
    prompt: Prompt
    pooling: Pooling
    urgency: Urgency = Urgency()


def token_request(job: Job, budget_s: float, spent_s: float) -> TokenRequest:
    """The message to the router, `spent_s` after the request came."""
    request = _request(job.model, job.owner, job.prompt, job.urgency, budget_s)
    request.ttft_ms = ttft_left_ms(job.urgency.targets.ttft_ms, 1000 * spent_s)
    request.itl_ms = job.urgency.targets.itl_ms
    request.sampling.CopyFrom(sampling_to_proto(job.params))
    request.choices.extend(range(job.params.n))
    return request


def ttft_left_ms(ttft_ms: float, spent_ms: float) -> float:
    """What is late already is wanted as soon as can be; 0 goes on to say nothing."""
    return max(1.0, ttft_ms - spent_ms) if ttft_ms else 0.0


def embedding_request(job: EmbeddingJob, budget_s: float) -> TokenRequest:
    request = _request(job.model, job.owner, job.prompt, job.urgency, budget_s)
    request.pooling = pooling_to_proto(job.pooling)
    return request


def _request(
    model: ModelInfo, owner: KvOwner, prompt: Prompt, urgency: Urgency, budget_s: float
) -> TokenRequest:
    """Under a random id: a caller's own id never travels."""
    return TokenRequest(
        request_id=secrets.token_hex(16),
        model=model.name,
        tenant=owner.tenant,
        cache_salt=owner.cache_salt,
        root_key=prompt.root_key,
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        priority=urgency.priority,
        tenant_weight=urgency.weight,
        budget_ms=min(round(budget_s * 1000), 2**32 - 1),
        block_keys=prompt.block_keys,
    )
