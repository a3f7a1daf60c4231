from paceline.v1 import common_pb2 as _common_pb2
from paceline.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelInfo(_message.Message):
    __slots__ = ("name", "content_digest", "serving_digest", "context_length", "vocab_size", "unavailable", "hidden_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SERVING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    content_digest: str
    serving_digest: str
    context_length: int
    vocab_size: int
    unavailable: bool
    hidden_size: int
    def __init__(self, name: _Optional[str] = ..., content_digest: _Optional[str] = ..., serving_digest: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., unavailable: _Optional[bool] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class GatewayFrame(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: SubmitRequest
    cancel: CancelRequest
    def __init__(self, submit: _Optional[_Union[SubmitRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("slot", "request")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request: _common_pb2.TokenRequest
    def __init__(self, slot: _Optional[int] = ..., request: _Optional[_Union[_common_pb2.TokenRequest, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("slot", "choices")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("emissions", "errors", "models", "models_changed", "draining", "setbacks")
    EMISSIONS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MODELS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SETBACKS_FIELD_NUMBER: _ClassVar[int]
    emissions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Emission]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SlotError]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    models_changed: bool
    draining: bool
    setbacks: _containers.RepeatedCompositeFieldContainer[SlotSetback]
    def __init__(self, emissions: _Optional[_Iterable[_Union[_common_pb2.Emission, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SlotError, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., models_changed: _Optional[bool] = ..., draining: _Optional[bool] = ..., setbacks: _Optional[_Iterable[_Union[SlotSetback, _Mapping]]] = ...) -> None: ...

class SlotSetback(_message.Message):
    __slots__ = ("slot", "num_failures", "lost")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    num_failures: int
    lost: _common_pb2.WorkerLife
    def __init__(self, slot: _Optional[int] = ..., num_failures: _Optional[int] = ..., lost: _Optional[_Union[_common_pb2.WorkerLife, _Mapping]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("num_decisions", "request_id")
    NUM_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    num_decisions: int
    request_id: str
    def __init__(self, num_decisions: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions", "quarantined")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    quarantined: _containers.RepeatedCompositeFieldContainer[QuarantinedRequest]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., quarantined: _Optional[_Iterable[_Union[QuarantinedRequest, _Mapping]]] = ...) -> None: ...

class QuarantinedRequest(_message.Message):
    __slots__ = ("unix_ms", "fingerprint", "request_id", "killed", "left_s")
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KILLED_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    unix_ms: int
    fingerprint: str
    request_id: str
    killed: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerLife]
    left_s: int
    def __init__(self, unix_ms: _Optional[int] = ..., fingerprint: _Optional[str] = ..., request_id: _Optional[str] = ..., killed: _Optional[_Iterable[_Union[_common_pb2.WorkerLife, _Mapping]]] = ..., left_s: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("unix_ms", "request_id", "attempt", "model", "num_tokens", "num_remaining", "prefill_worker", "decode_worker", "considered")
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMAINING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    unix_ms: int
    request_id: str
    attempt: int
    model: str
    num_tokens: int
    num_remaining: int
    prefill_worker: str
    decode_worker: str
    considered: _containers.RepeatedCompositeFieldContainer[ConsideredWorker]
    def __init__(self, unix_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., model: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_remaining: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., considered: _Optional[_Iterable[_Union[ConsideredWorker, _Mapping]]] = ...) -> None: ...

class ConsideredWorker(_message.Message):
    __slots__ = ("worker_id", "is_prefill", "num_cached_tokens", "uncached", "waiting", "unreported", "running", "balance", "misses", "pull")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    UNREPORTED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BALANCE_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    is_prefill: bool
    num_cached_tokens: int
    uncached: float
    waiting: float
    unreported: float
    running: float
    balance: float
    misses: float
    pull: float
    def __init__(self, worker_id: _Optional[str] = ..., is_prefill: _Optional[bool] = ..., num_cached_tokens: _Optional[int] = ..., uncached: _Optional[float] = ..., waiting: _Optional[float] = ..., unreported: _Optional[float] = ..., running: _Optional[float] = ..., balance: _Optional[float] = ..., misses: _Optional[float] = ..., pull: _Optional[float] = ...) -> None: ...

class WorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkersResponse(_message.Message):
    __slots__ = ("workers", "num_queued", "num_queued_tokens", "num_queued_by_digest")
    class NumQueuedByDigestEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_BY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[KnownWorker]
    num_queued: int
    num_queued_tokens: int
    num_queued_by_digest: _containers.ScalarMap[str, int]
    def __init__(self, workers: _Optional[_Iterable[_Union[KnownWorker, _Mapping]]] = ..., num_queued: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_queued_by_digest: _Optional[_Mapping[str, int]] = ...) -> None: ...

class KnownWorker(_message.Message):
    __slots__ = ("info", "load", "is_usable")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_USABLE_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.WorkerInfo
    load: _worker_pb2.Load
    is_usable: bool
    def __init__(self, info: _Optional[_Union[_worker_pb2.WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., is_usable: _Optional[bool] = ...) -> None: ...
