from kvhost_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "boot_id", "pid", "uptime_s", "state", "memory", "namespaces", "sessions", "counters", "anomalies", "config", "config_sources", "evictions", "metrics_url")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AnomaliesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ConfigSourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ANOMALIES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SOURCES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    boot_id: str
    pid: int
    uptime_s: float
    state: _common_pb2.ServiceState
    memory: Memory
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    counters: _containers.ScalarMap[str, int]
    anomalies: _containers.ScalarMap[str, int]
    config: _containers.ScalarMap[str, str]
    config_sources: _containers.ScalarMap[str, str]
    evictions: _containers.RepeatedCompositeFieldContainer[EvictionRun]
    metrics_url: str
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., state: _Optional[_Union[_common_pb2.ServiceState, str]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., anomalies: _Optional[_Mapping[str, int]] = ..., config: _Optional[_Mapping[str, str]] = ..., config_sources: _Optional[_Mapping[str, str]] = ..., evictions: _Optional[_Iterable[_Union[EvictionRun, _Mapping]]] = ..., metrics_url: _Optional[str] = ...) -> None: ...

class EvictionRun(_message.Message):
    __slots__ = ("namespace_number", "cause", "taker", "chunks", "began_s", "ended_s", "youngest_s", "oldest_s")
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TAKER_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    YOUNGEST_S_FIELD_NUMBER: _ClassVar[int]
    OLDEST_S_FIELD_NUMBER: _ClassVar[int]
    namespace_number: int
    cause: str
    taker: int
    chunks: int
    began_s: float
    ended_s: float
    youngest_s: float
    oldest_s: float
    def __init__(self, namespace_number: _Optional[int] = ..., cause: _Optional[str] = ..., taker: _Optional[int] = ..., chunks: _Optional[int] = ..., began_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., youngest_s: _Optional[float] = ..., oldest_s: _Optional[float] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("asked_bytes", "capacity_bytes", "populated_bytes", "segment_bytes", "segments", "free_segments", "locked_bytes", "hugepages", "used_bytes", "pinned_bytes", "granted_bytes", "quarantined_bytes", "retiring_segments", "notes")
    ASKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    POPULATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LOCKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HUGEPAGES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRING_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    asked_bytes: int
    capacity_bytes: int
    populated_bytes: int
    segment_bytes: int
    segments: int
    free_segments: int
    locked_bytes: int
    hugepages: str
    used_bytes: int
    pinned_bytes: int
    granted_bytes: int
    quarantined_bytes: int
    retiring_segments: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, asked_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., populated_bytes: _Optional[int] = ..., segment_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., free_segments: _Optional[int] = ..., locked_bytes: _Optional[int] = ..., hugepages: _Optional[str] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., retiring_segments: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("number", "digest", "name", "model", "generation", "parts", "layout", "slot_bytes", "segments", "slots", "chunks", "pinned_chunks", "granted_slots", "quarantined_slots", "sessions", "floor_segments", "cap_segments", "counters", "operator_pins", "policy")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    CAP_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_PINS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    number: int
    digest: str
    name: str
    model: str
    generation: int
    parts: _containers.RepeatedCompositeFieldContainer[_common_pb2.DigestPart]
    layout: _common_pb2.Layout
    slot_bytes: int
    segments: int
    slots: int
    chunks: int
    pinned_chunks: int
    granted_slots: int
    quarantined_slots: int
    sessions: int
    floor_segments: int
    cap_segments: int
    counters: _containers.ScalarMap[str, int]
    operator_pins: int
    policy: str
    def __init__(self, number: _Optional[int] = ..., digest: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., generation: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[_common_pb2.DigestPart, _Mapping]]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., slot_bytes: _Optional[int] = ..., segments: _Optional[int] = ..., slots: _Optional[int] = ..., chunks: _Optional[int] = ..., pinned_chunks: _Optional[int] = ..., granted_slots: _Optional[int] = ..., quarantined_slots: _Optional[int] = ..., sessions: _Optional[int] = ..., floor_segments: _Optional[int] = ..., cap_segments: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., operator_pins: _Optional[int] = ..., policy: _Optional[str] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("number", "label", "namespace_number", "pid", "uid", "age_s", "pins", "grants", "quarantined", "pin_bound", "grant_bound", "mappings", "state")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PIN_BOUND_FIELD_NUMBER: _ClassVar[int]
    GRANT_BOUND_FIELD_NUMBER: _ClassVar[int]
    MAPPINGS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    label: str
    namespace_number: int
    pid: int
    uid: int
    age_s: float
    pins: int
    grants: int
    quarantined: int
    pin_bound: int
    grant_bound: int
    mappings: _containers.RepeatedCompositeFieldContainer[MappingStatus]
    state: str
    def __init__(self, number: _Optional[int] = ..., label: _Optional[str] = ..., namespace_number: _Optional[int] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., age_s: _Optional[float] = ..., pins: _Optional[int] = ..., grants: _Optional[int] = ..., quarantined: _Optional[int] = ..., pin_bound: _Optional[int] = ..., grant_bound: _Optional[int] = ..., mappings: _Optional[_Iterable[_Union[MappingStatus, _Mapping]]] = ..., state: _Optional[str] = ...) -> None: ...

class MappingStatus(_message.Message):
    __slots__ = ("rank", "pid", "uid", "access", "segments", "open_fences")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FENCES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    uid: int
    access: str
    segments: int
    open_fences: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., access: _Optional[str] = ..., segments: _Optional[int] = ..., open_fences: _Optional[int] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ...) -> None: ...

class LookupChunksRequest(_message.Message):
    __slots__ = ("namespace", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class ChunkStatus(_message.Message):
    __slots__ = ("key", "state", "slot", "pins", "parent", "children", "idle_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    key: str
    state: str
    slot: int
    pins: int
    parent: str
    children: int
    idle_s: float
    def __init__(self, key: _Optional[str] = ..., state: _Optional[str] = ..., slot: _Optional[int] = ..., pins: _Optional[int] = ..., parent: _Optional[str] = ..., children: _Optional[int] = ..., idle_s: _Optional[float] = ...) -> None: ...

class LookupChunksReply(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkStatus]
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkStatus, _Mapping]]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("namespace", "keys", "all")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, namespace: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., all: bool = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("evicted", "held", "absent")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    evicted: int
    held: int
    absent: int
    def __init__(self, evicted: _Optional[int] = ..., held: _Optional[int] = ..., absent: _Optional[int] = ...) -> None: ...

class ResetNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class ResetNamespaceReply(_message.Message):
    __slots__ = ("generation", "dropped")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    dropped: int
    def __init__(self, generation: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class EndSessionReply(_message.Message):
    __slots__ = ("quarantined",)
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    quarantined: int
    def __init__(self, quarantined: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume",)
    RESUME_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    def __init__(self, resume: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.ServiceState
    def __init__(self, state: _Optional[_Union[_common_pb2.ServiceState, str]] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("namespace", "floor_bytes", "cap_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    floor_bytes: int
    cap_bytes: int
    def __init__(self, namespace: _Optional[str] = ..., floor_bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ...) -> None: ...

class SetLimitsReply(_message.Message):
    __slots__ = ("floor_segments", "cap_segments")
    FLOOR_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    CAP_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    floor_segments: int
    cap_segments: int
    def __init__(self, floor_segments: _Optional[int] = ..., cap_segments: _Optional[int] = ...) -> None: ...

class ResizePoolRequest(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class ResizePoolReply(_message.Message):
    __slots__ = ("segments", "segment_bytes")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    segments: int
    segment_bytes: int
    def __init__(self, segments: _Optional[int] = ..., segment_bytes: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "keys", "request")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    request: str
    def __init__(self, namespace: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., request: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("request", "session_number", "age_s", "namespace_number", "chains")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SESSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    request: str
    session_number: int
    age_s: float
    namespace_number: int
    chains: _containers.RepeatedCompositeFieldContainer[ExplainedChain]
    def __init__(self, request: _Optional[str] = ..., session_number: _Optional[int] = ..., age_s: _Optional[float] = ..., namespace_number: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[ExplainedChain, _Mapping]]] = ...) -> None: ...

class ExplainedChain(_message.Message):
    __slots__ = ("group", "semantics", "tokens_per_chunk", "chunks", "usable", "hits_then", "summary")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEMANTICS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    HITS_THEN_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    group: int
    semantics: _common_pb2.Semantics
    tokens_per_chunk: int
    chunks: _containers.RepeatedCompositeFieldContainer[ExplainedChunk]
    usable: int
    hits_then: int
    summary: str
    def __init__(self, group: _Optional[int] = ..., semantics: _Optional[_Union[_common_pb2.Semantics, str]] = ..., tokens_per_chunk: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ExplainedChunk, _Mapping]]] = ..., usable: _Optional[int] = ..., hits_then: _Optional[int] = ..., summary: _Optional[str] = ...) -> None: ...

class ExplainedChunk(_message.Message):
    __slots__ = ("key", "state", "why", "ago_s", "other_namespace")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    key: str
    state: str
    why: str
    ago_s: float
    other_namespace: int
    def __init__(self, key: _Optional[str] = ..., state: _Optional[str] = ..., why: _Optional[str] = ..., ago_s: _Optional[float] = ..., other_namespace: _Optional[int] = ...) -> None: ...

class PinChunksRequest(_message.Message):
    __slots__ = ("namespace", "keys", "request")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    request: str
    def __init__(self, namespace: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., request: _Optional[str] = ...) -> None: ...

class PinChunksReply(_message.Message):
    __slots__ = ("pinned", "already", "absent", "total", "bound")
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    pinned: int
    already: int
    absent: int
    total: int
    bound: int
    def __init__(self, pinned: _Optional[int] = ..., already: _Optional[int] = ..., absent: _Optional[int] = ..., total: _Optional[int] = ..., bound: _Optional[int] = ...) -> None: ...

class UnpinChunksRequest(_message.Message):
    __slots__ = ("namespace", "keys", "request", "all")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    request: str
    all: bool
    def __init__(self, namespace: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., request: _Optional[str] = ..., all: bool = ...) -> None: ...

class UnpinChunksReply(_message.Message):
    __slots__ = ("unpinned", "absent")
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    absent: int
    def __init__(self, unpinned: _Optional[int] = ..., absent: _Optional[int] = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class DropNamespaceReply(_message.Message):
    __slots__ = ("segments", "kept")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    segments: int
    kept: int
    def __init__(self, segments: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityReply(_message.Message):
    __slots__ = ("ok", "problems")
    OK_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ok: bool = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...
