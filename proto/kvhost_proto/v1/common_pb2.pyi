from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_STATE_UNSPECIFIED: _ClassVar[ServiceState]
    SERVICE_STATE_STARTING: _ClassVar[ServiceState]
    SERVICE_STATE_SERVING: _ClassVar[ServiceState]
    SERVICE_STATE_DRAINING: _ClassVar[ServiceState]

class Semantics(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEMANTICS_UNSPECIFIED: _ClassVar[Semantics]
    SEMANTICS_PREFIX: _ClassVar[Semantics]
    SEMANTICS_SET: _ClassVar[Semantics]
SERVICE_STATE_UNSPECIFIED: ServiceState
SERVICE_STATE_STARTING: ServiceState
SERVICE_STATE_SERVING: ServiceState
SERVICE_STATE_DRAINING: ServiceState
SEMANTICS_UNSPECIFIED: Semantics
SEMANTICS_PREFIX: Semantics
SEMANTICS_SET: Semantics

class Stamp(_message.Message):
    __slots__ = ("boot_id", "generation")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    generation: int
    def __init__(self, boot_id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("major", "minor", "program")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    program: str
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ..., program: _Optional[str] = ...) -> None: ...

class DigestPart(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("id", "semantics", "tokens_per_chunk")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEMANTICS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    id: int
    semantics: Semantics
    tokens_per_chunk: int
    def __init__(self, id: _Optional[int] = ..., semantics: _Optional[_Union[Semantics, str]] = ..., tokens_per_chunk: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("shard_bytes", "shards", "ranks", "key_bytes", "groups")
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    shard_bytes: int
    shards: int
    ranks: int
    key_bytes: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, shard_bytes: _Optional[int] = ..., shards: _Optional[int] = ..., ranks: _Optional[int] = ..., key_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class NamespaceSpec(_message.Message):
    __slots__ = ("name", "model", "parts", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    parts: _containers.RepeatedCompositeFieldContainer[DigestPart]
    layout: Layout
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[DigestPart, _Mapping]]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...
