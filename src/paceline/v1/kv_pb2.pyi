from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("reader_worker", "reader_incarnation", "content_digest", "layout_digest", "content_parts", "source_incarnation")
    class ContentPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    READER_WORKER_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTENT_PARTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    reader_worker: str
    reader_incarnation: str
    content_digest: str
    layout_digest: str
    content_parts: _containers.ScalarMap[str, str]
    source_incarnation: str
    def __init__(self, reader_worker: _Optional[str] = ..., reader_incarnation: _Optional[str] = ..., content_digest: _Optional[str] = ..., layout_digest: _Optional[str] = ..., content_parts: _Optional[_Mapping[str, str]] = ..., source_incarnation: _Optional[str] = ...) -> None: ...

class TransportAddress(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: bytes
    def __init__(self, name: _Optional[str] = ..., address: _Optional[bytes] = ...) -> None: ...

class PageGroup(_message.Message):
    __slots__ = ("name", "num_layers", "num_planes", "num_heads", "head_dim", "dtype", "page_tokens", "window")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANES_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_layers: int
    num_planes: int
    num_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    window: int
    def __init__(self, name: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_planes: _Optional[int] = ..., num_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., page_tokens: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class LayerPlace(_message.Message):
    __slots__ = ("group", "index")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    group: int
    index: int
    def __init__(self, group: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class RankPages(_message.Message):
    __slots__ = ("first_head", "num_heads", "first_page")
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    first_head: int
    num_heads: int
    first_page: int
    def __init__(self, first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., first_page: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "content_digest", "layout_digest", "groups", "num_pages", "transports", "canary", "layers", "ranks", "content_parts")
    class ContentPartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_PARTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    content_digest: str
    layout_digest: str
    groups: _containers.RepeatedCompositeFieldContainer[PageGroup]
    num_pages: int
    transports: _containers.RepeatedCompositeFieldContainer[TransportAddress]
    canary: _containers.RepeatedCompositeFieldContainer[PageRef]
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlace]
    ranks: _containers.RepeatedCompositeFieldContainer[RankPages]
    content_parts: _containers.ScalarMap[str, str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., content_digest: _Optional[str] = ..., layout_digest: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[PageGroup, _Mapping]]] = ..., num_pages: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportAddress, _Mapping]]] = ..., canary: _Optional[_Iterable[_Union[PageRef, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[LayerPlace, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankPages, _Mapping]]] = ..., content_parts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ProgressRequest(_message.Message):
    __slots__ = ("ticket", "first_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    first_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., first_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class ProgressEvent(_message.Message):
    __slots__ = ("num_committed_blocks", "record", "error", "rest")
    NUM_COMMITTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    num_committed_blocks: int
    record: HandoffRecord
    error: _common_pb2.Error
    rest: PinResponse
    def __init__(self, num_committed_blocks: _Optional[int] = ..., record: _Optional[_Union[HandoffRecord, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., rest: _Optional[_Union[PinResponse, _Mapping]] = ...) -> None: ...

class HandoffRecord(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_tokens", "first_tokens", "sidecars")
    class SidecarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIDECARS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_tokens: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    sidecars: _containers.ScalarMap[str, bytes]
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., sidecars: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "finish")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    finish: _common_pb2.FinishReason
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("ticket", "runs", "with_tail")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    WITH_TAIL_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    runs: _containers.RepeatedCompositeFieldContainer[KeyRun]
    with_tail: bool
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[KeyRun, _Mapping]]] = ..., with_tail: _Optional[bool] = ...) -> None: ...

class KeyRun(_message.Message):
    __slots__ = ("group", "keys")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: bytes
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class PageRef(_message.Message):
    __slots__ = ("page", "generation", "checksums", "block")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    page: int
    generation: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    block: int
    def __init__(self, page: _Optional[int] = ..., generation: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., block: _Optional[int] = ...) -> None: ...

class PageRun(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[PageRef]
    def __init__(self, pages: _Optional[_Iterable[_Union[PageRef, _Mapping]]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("lease_id", "runs", "tails", "num_tail_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    tails: _containers.RepeatedCompositeFieldContainer[PageRef]
    num_tail_tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ..., tails: _Optional[_Iterable[_Union[PageRef, _Mapping]]] = ..., num_tail_tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("ticket", "lease_id", "complete")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    lease_id: str
    complete: bool
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ..., lease_id: _Optional[str] = ..., complete: _Optional[bool] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("page", "generation")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    page: int
    generation: int
    def __init__(self, page: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("dropped", "known")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    dropped: bool
    known: bool
    def __init__(self, dropped: _Optional[bool] = ..., known: _Optional[bool] = ...) -> None: ...

class LeaseBeat(_message.Message):
    __slots__ = ("reader_worker", "reader_incarnation", "lease_ids")
    READER_WORKER_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    reader_worker: str
    reader_incarnation: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reader_worker: _Optional[str] = ..., reader_incarnation: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaseBeatReply(_message.Message):
    __slots__ = ("unknown_lease_ids",)
    UNKNOWN_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    unknown_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...
