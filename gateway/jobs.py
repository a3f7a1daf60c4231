"""A checked request in tokens, ready to be sent to a router."""

import secrets
from dataclasses import dataclass

from paceline.core.sampling import SamplingParams
from paceline.gateway.stop_strings import StopAutomaton
from paceline.rpc.convert import sampling_to_proto
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
class Job:
    """One prompt with its n choices; `first_choice` is where they stand in the response."""

    model: ModelInfo
    owner: KvOwner
    prompt: Prompt
    params: SamplingParams
    stops: tuple[StopAutomaton, ...]
    priority: int = 0
    first_choice: int = 0
    text: TextOptions = TextOptions()


def token_request(job: Job, budget_s: float) -> TokenRequest:
    """The message to the router, under a random id: a caller's own id never travels."""
    return TokenRequest(
        request_id=secrets.token_hex(16),
        model=job.model.name,
        tenant=job.owner.tenant,
        cache_salt=job.owner.cache_salt,
        root_key=job.prompt.root_key,
        token_ids=job.prompt.token_ids,
        num_prompt_tokens=len(job.prompt.token_ids),
        sampling=sampling_to_proto(job.params),
        choices=range(job.params.n),
        priority=job.priority,
        budget_ms=min(round(budget_s * 1000), 2**32 - 1),
        block_keys=job.prompt.block_keys,
    )
