from kvhost_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVE_STATUS_UNSPECIFIED: _ClassVar[ReserveStatus]
    RESERVE_STATUS_RESERVED: _ClassVar[ReserveStatus]
    RESERVE_STATUS_EXISTS: _ClassVar[ReserveStatus]
    RESERVE_STATUS_BEING_WRITTEN: _ClassVar[ReserveStatus]
    RESERVE_STATUS_NO_SPACE: _ClassVar[ReserveStatus]
    RESERVE_STATUS_BOUND: _ClassVar[ReserveStatus]

class ItemKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_KIND_UNSPECIFIED: _ClassVar[ItemKind]
    ITEM_KIND_ASSIGN: _ClassVar[ItemKind]
    ITEM_KIND_COMMIT: _ClassVar[ItemKind]
    ITEM_KIND_ABORT: _ClassVar[ItemKind]
    ITEM_KIND_RELEASE: _ClassVar[ItemKind]
    ITEM_KIND_TOUCH: _ClassVar[ItemKind]
RESERVE_STATUS_UNSPECIFIED: ReserveStatus
RESERVE_STATUS_RESERVED: ReserveStatus
RESERVE_STATUS_EXISTS: ReserveStatus
RESERVE_STATUS_BEING_WRITTEN: ReserveStatus
RESERVE_STATUS_NO_SPACE: ReserveStatus
RESERVE_STATUS_BOUND: ReserveStatus
ITEM_KIND_UNSPECIFIED: ItemKind
ITEM_KIND_ASSIGN: ItemKind
ITEM_KIND_COMMIT: ItemKind
ITEM_KIND_ABORT: ItemKind
ITEM_KIND_RELEASE: ItemKind
ITEM_KIND_TOUCH: ItemKind

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("stamp", "version", "state", "populated")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POPULATED_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    version: _common_pb2.Version
    state: _common_pb2.ServiceState
    populated: float
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., state: _Optional[_Union[_common_pb2.ServiceState, str]] = ..., populated: _Optional[float] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("ticket", "version", "label")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    version: _common_pb2.Version
    label: str
    def __init__(self, ticket: _Optional[bytes] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., label: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("stamp", "opened", "state", "mapped", "recall", "removed", "resync", "fenced", "going_down")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    GOING_DOWN_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    opened: Opened
    state: StateChanged
    mapped: Mapped
    recall: Recall
    removed: Removed
    resync: Resync
    fenced: Fenced
    going_down: GoingDown
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., state: _Optional[_Union[StateChanged, _Mapping]] = ..., mapped: _Optional[_Union[Mapped, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., removed: _Optional[_Union[Removed, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., fenced: _Optional[_Union[Fenced, _Mapping]] = ..., going_down: _Optional[_Union[GoingDown, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session_id", "number", "version", "state")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    number: int
    version: _common_pb2.Version
    state: _common_pb2.ServiceState
    def __init__(self, session_id: _Optional[bytes] = ..., number: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., state: _Optional[_Union[_common_pb2.ServiceState, str]] = ...) -> None: ...

class StateChanged(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.ServiceState
    def __init__(self, state: _Optional[_Union[_common_pb2.ServiceState, str]] = ...) -> None: ...

class Mapped(_message.Message):
    __slots__ = ("mapped_ranks", "ranks", "ready")
    MAPPED_RANKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    mapped_ranks: int
    ranks: int
    ready: bool
    def __init__(self, mapped_ranks: _Optional[int] = ..., ranks: _Optional[int] = ..., ready: bool = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("grants",)
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    grants: int
    def __init__(self, grants: _Optional[int] = ...) -> None: ...

class Removed(_message.Message):
    __slots__ = ("keys", "key_bytes")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    key_bytes: int
    def __init__(self, keys: _Optional[bytes] = ..., key_bytes: _Optional[int] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: int
    def __init__(self, slots: _Optional[int] = ...) -> None: ...

class GoingDown(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class WorkerToken(_message.Message):
    __slots__ = ("rank", "token")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    token: bytes
    def __init__(self, rank: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class DeclareNamespaceRequest(_message.Message):
    __slots__ = ("session_id", "spec", "workers")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    spec: _common_pb2.NamespaceSpec
    workers: _containers.RepeatedCompositeFieldContainer[WorkerToken]
    def __init__(self, session_id: _Optional[bytes] = ..., spec: _Optional[_Union[_common_pb2.NamespaceSpec, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerToken, _Mapping]]] = ...) -> None: ...

class DeclareNamespaceReply(_message.Message):
    __slots__ = ("stamp", "digest", "namespace_number", "slot_bytes", "shard_stride", "slots_per_segment", "existed", "slots")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_STRIDE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    digest: bytes
    namespace_number: int
    slot_bytes: int
    shard_stride: int
    slots_per_segment: int
    existed: bool
    slots: int
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., digest: _Optional[bytes] = ..., namespace_number: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., shard_stride: _Optional[int] = ..., slots_per_segment: _Optional[int] = ..., existed: bool = ..., slots: _Optional[int] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("group", "semantics", "key_bytes", "keys")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEMANTICS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    group: int
    semantics: _common_pb2.Semantics
    key_bytes: int
    keys: bytes
    def __init__(self, group: _Optional[int] = ..., semantics: _Optional[_Union[_common_pb2.Semantics, str]] = ..., key_bytes: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LookupQuery(_message.Message):
    __slots__ = ("tag", "chains", "request")
    TAG_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    tag: int
    chains: _containers.RepeatedCompositeFieldContainer[Chain]
    request: str
    def __init__(self, tag: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[Chain, _Mapping]]] = ..., request: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "queries", "pin", "namespace")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    queries: _containers.RepeatedCompositeFieldContainer[LookupQuery]
    pin: bool
    namespace: str
    def __init__(self, session_id: _Optional[bytes] = ..., queries: _Optional[_Iterable[_Union[LookupQuery, _Mapping]]] = ..., pin: bool = ..., namespace: _Optional[str] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("stamp", "answers")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    answers: _containers.RepeatedCompositeFieldContainer[LookupAnswer]
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., answers: _Optional[_Iterable[_Union[LookupAnswer, _Mapping]]] = ...) -> None: ...

class LookupAnswer(_message.Message):
    __slots__ = ("tag", "chains")
    TAG_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    tag: int
    chains: _containers.RepeatedCompositeFieldContainer[ChainAnswer]
    def __init__(self, tag: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[ChainAnswer, _Mapping]]] = ...) -> None: ...

class ChainAnswer(_message.Message):
    __slots__ = ("found", "slots", "first_pin_id", "checksums")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PIN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    found: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    first_pin_id: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, found: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., first_pin_id: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("group", "key", "parent", "checksum")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    group: int
    key: bytes
    parent: bytes
    checksum: int
    def __init__(self, group: _Optional[int] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "count", "chunks")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    count: int
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, session_id: _Optional[bytes] = ..., count: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("stamp", "store_ids", "slots", "chunk_status", "chunk_store_ids", "chunk_slots", "pending", "reason")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    STORE_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STATUS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STORE_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    store_ids: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    chunk_status: _containers.RepeatedScalarFieldContainer[ReserveStatus]
    chunk_store_ids: _containers.RepeatedScalarFieldContainer[int]
    chunk_slots: _containers.RepeatedScalarFieldContainer[int]
    pending: bool
    reason: str
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., store_ids: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., chunk_status: _Optional[_Iterable[_Union[ReserveStatus, str]]] = ..., chunk_store_ids: _Optional[_Iterable[int]] = ..., chunk_slots: _Optional[_Iterable[int]] = ..., pending: bool = ..., reason: _Optional[str] = ...) -> None: ...

class StoreOf(_message.Message):
    __slots__ = ("store_id", "chunk")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    store_id: int
    chunk: Chunk
    def __init__(self, store_id: _Optional[int] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("store_id", "unquiet_ranks")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    UNQUIET_RANKS_FIELD_NUMBER: _ClassVar[int]
    store_id: int
    unquiet_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, store_id: _Optional[int] = ..., unquiet_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class UpdateRequest(_message.Message):
    __slots__ = ("session_id", "assigns", "commits", "aborts", "releases", "touches")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    TOUCHES_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    assigns: _containers.RepeatedCompositeFieldContainer[StoreOf]
    commits: _containers.RepeatedCompositeFieldContainer[StoreOf]
    aborts: _containers.RepeatedCompositeFieldContainer[Abort]
    releases: _containers.RepeatedScalarFieldContainer[int]
    touches: _containers.RepeatedCompositeFieldContainer[Chain]
    def __init__(self, session_id: _Optional[bytes] = ..., assigns: _Optional[_Iterable[_Union[StoreOf, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[StoreOf, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[Abort, _Mapping]]] = ..., releases: _Optional[_Iterable[int]] = ..., touches: _Optional[_Iterable[_Union[Chain, _Mapping]]] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("kind", "id", "code", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: ItemKind
    id: int
    code: int
    message: str
    def __init__(self, kind: _Optional[_Union[ItemKind, str]] = ..., id: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class UpdateReply(_message.Message):
    __slots__ = ("stamp", "errors", "superseded")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    errors: _containers.RepeatedCompositeFieldContainer[ItemError]
    superseded: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[ItemError, _Mapping]]] = ..., superseded: _Optional[_Iterable[int]] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("id", "lookup", "reserve", "update")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    id: int
    lookup: LookupRequest
    reserve: ReserveRequest
    update: UpdateRequest
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., update: _Optional[_Union[UpdateRequest, _Mapping]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("id", "lookup", "reserve", "update", "refused", "stamp")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    id: int
    lookup: LookupReply
    reserve: ReserveReply
    update: UpdateReply
    refused: Refusal
    stamp: _common_pb2.Stamp
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupReply, _Mapping]] = ..., reserve: _Optional[_Union[ReserveReply, _Mapping]] = ..., update: _Optional[_Union[UpdateReply, _Mapping]] = ..., refused: _Optional[_Union[Refusal, _Mapping]] = ..., stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session_id", "weights_version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    weights_version: str
    def __init__(self, session_id: _Optional[bytes] = ..., weights_version: _Optional[str] = ...) -> None: ...

class ResetReply(_message.Message):
    __slots__ = ("stamp", "digest", "namespace_number")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    digest: bytes
    namespace_number: int
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., digest: _Optional[bytes] = ..., namespace_number: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("stamp", "namespace_number", "sequence", "stored", "removed", "gap", "synced")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    namespace_number: int
    sequence: int
    stored: KeyList
    removed: KeyList
    gap: Gap
    synced: Synced
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., namespace_number: _Optional[int] = ..., sequence: _Optional[int] = ..., stored: _Optional[_Union[KeyList, _Mapping]] = ..., removed: _Optional[_Union[KeyList, _Mapping]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., synced: _Optional[_Union[Synced, _Mapping]] = ...) -> None: ...

class KeyList(_message.Message):
    __slots__ = ("key_bytes", "keys", "parents")
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    key_bytes: int
    keys: bytes
    parents: bytes
    def __init__(self, key_bytes: _Optional[int] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Synced(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
