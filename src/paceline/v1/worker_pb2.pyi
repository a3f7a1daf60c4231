from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role

class ChangeRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role", "if_version", "reason", "drain_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IF_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    if_version: int
    reason: str
    drain_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., if_version: _Optional[int] = ..., reason: _Optional[str] = ..., drain_ms: _Optional[int] = ...) -> None: ...

class RoleState(_message.Message):
    __slots__ = ("role", "version", "num_leaving")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_LEAVING_FIELD_NUMBER: _ClassVar[int]
    role: Role
    version: int
    num_leaving: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., version: _Optional[int] = ..., num_leaving: _Optional[int] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("beat", "run", "reserve", "prefill", "adopt", "cancel", "revoke", "let_go")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    LET_GO_FIELD_NUMBER: _ClassVar[int]
    beat: Beat
    run: RunWhole
    reserve: Reserve
    prefill: Prefill
    adopt: Adopt
    cancel: CancelSlot
    revoke: Revoke
    let_go: LetGo
    def __init__(self, beat: _Optional[_Union[Beat, _Mapping]] = ..., run: _Optional[_Union[RunWhole, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., cancel: _Optional[_Union[CancelSlot, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., let_go: _Optional[_Union[LetGo, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class RunWhole(_message.Message):
    __slots__ = ("slot", "request", "hints")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request: _common_pb2.TokenRequest
    hints: _containers.RepeatedCompositeFieldContainer[PrefixHint]
    def __init__(self, slot: _Optional[int] = ..., request: _Optional[_Union[_common_pb2.TokenRequest, _Mapping]] = ..., hints: _Optional[_Iterable[_Union[PrefixHint, _Mapping]]] = ...) -> None: ...

class PrefixHint(_message.Message):
    __slots__ = ("ticket", "source_endpoint", "num_blocks", "num_own_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_OWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    source_endpoint: str
    num_blocks: int
    num_own_blocks: int
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., source_endpoint: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_own_blocks: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("slot", "request", "hold_ms")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request: _common_pb2.TokenRequest
    hold_ms: int
    def __init__(self, slot: _Optional[int] = ..., request: _Optional[_Union[_common_pb2.TokenRequest, _Mapping]] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("slot", "request", "ticket", "hints", "keep_ms")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_MS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request: _common_pb2.TokenRequest
    ticket: _common_pb2.Ticket
    hints: _containers.RepeatedCompositeFieldContainer[PrefixHint]
    keep_ms: int
    def __init__(self, slot: _Optional[int] = ..., request: _Optional[_Union[_common_pb2.TokenRequest, _Mapping]] = ..., ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., hints: _Optional[_Iterable[_Union[PrefixHint, _Mapping]]] = ..., keep_ms: _Optional[int] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("slot", "ticket", "source_endpoint")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    ticket: _common_pb2.Ticket
    source_endpoint: str
    def __init__(self, slot: _Optional[int] = ..., ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., source_endpoint: _Optional[str] = ...) -> None: ...

class CancelSlot(_message.Message):
    __slots__ = ("slot", "choices")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class LetGo(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    def __init__(self, slot: _Optional[int] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "endpoint", "model", "content_digest", "layout_digest", "serving_digest", "context_length", "vocab_size", "num_pages", "page_bytes", "transports", "signature", "most_pages", "hidden_size", "zone", "node", "role_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SERVING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    MOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: Role
    endpoint: str
    model: str
    content_digest: str
    layout_digest: str
    serving_digest: str
    context_length: int
    vocab_size: int
    num_pages: int
    page_bytes: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    signature: bytes
    most_pages: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    zone: str
    node: str
    role_version: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., endpoint: _Optional[str] = ..., model: _Optional[str] = ..., content_digest: _Optional[str] = ..., layout_digest: _Optional[str] = ..., serving_digest: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., signature: _Optional[bytes] = ..., most_pages: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., zone: _Optional[str] = ..., node: _Optional[str] = ..., role_version: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_waiting_tokens", "num_free_pages", "num_pages", "step", "draining", "rounds", "prompt_token_us")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_pages: int
    num_pages: int
    step: int
    draining: bool
    rounds: int
    prompt_token_us: float
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_pages: _Optional[int] = ..., step: _Optional[int] = ..., draining: _Optional[bool] = ..., rounds: _Optional[int] = ..., prompt_token_us: _Optional[float] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("info", "emissions", "errors", "reserved", "busy", "load", "ended_slots", "links")
    INFO_FIELD_NUMBER: _ClassVar[int]
    EMISSIONS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENDED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    emissions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Emission]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SlotError]
    reserved: _containers.RepeatedCompositeFieldContainer[Reserved]
    busy: _containers.RepeatedCompositeFieldContainer[Busy]
    load: Load
    ended_slots: _containers.RepeatedScalarFieldContainer[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkFigure]
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., emissions: _Optional[_Iterable[_Union[_common_pb2.Emission, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SlotError, _Mapping]]] = ..., reserved: _Optional[_Iterable[_Union[Reserved, _Mapping]]] = ..., busy: _Optional[_Iterable[_Union[Busy, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., ended_slots: _Optional[_Iterable[int]] = ..., links: _Optional[_Iterable[_Union[LinkFigure, _Mapping]]] = ...) -> None: ...

class LinkFigure(_message.Message):
    __slots__ = ("source", "token_us")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    source: str
    token_us: float
    def __init__(self, source: _Optional[str] = ..., token_us: _Optional[float] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("slot", "num_cached_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    num_cached_tokens: int
    def __init__(self, slot: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ("slot", "num_pages_needed", "num_pages_free")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_NEEDED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    num_pages_needed: int
    num_pages_free: int
    def __init__(self, slot: _Optional[int] = ..., num_pages_needed: _Optional[int] = ..., num_pages_free: _Optional[int] = ...) -> None: ...
