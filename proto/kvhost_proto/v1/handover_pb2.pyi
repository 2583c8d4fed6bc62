from kvhost_proto.v1 import common_pb2 as _common_pb2
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
    ROLE_SCHEDULER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]

class Access(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_UNSPECIFIED: _ClassVar[Access]
    ACCESS_CPU: _ClassVar[Access]
    ACCESS_DEVICE_DMA: _ClassVar[Access]
ROLE_UNSPECIFIED: Role
ROLE_SCHEDULER: Role
ROLE_WORKER: Role
ACCESS_UNSPECIFIED: Access
ACCESS_CPU: Access
ACCESS_DEVICE_DMA: Access

class ToDaemon(_message.Message):
    __slots__ = ("hello", "mapped", "fenced", "retired", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    mapped: MappedSegments
    fenced: FenceDone
    retired: Retired
    bye: Bye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., mapped: _Optional[_Union[MappedSegments, _Mapping]] = ..., fenced: _Optional[_Union[FenceDone, _Mapping]] = ..., retired: _Optional[_Union[Retired, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "instance_id", "role", "rank", "access", "token", "with_pidfd")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WITH_PIDFD_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    instance_id: bytes
    role: Role
    rank: int
    access: Access
    token: bytes
    with_pidfd: bool
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., instance_id: _Optional[bytes] = ..., role: _Optional[_Union[Role, str]] = ..., rank: _Optional[int] = ..., access: _Optional[_Union[Access, str]] = ..., token: _Optional[bytes] = ..., with_pidfd: bool = ...) -> None: ...

class MappedSegments(_message.Message):
    __slots__ = ("segment_ids",)
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segment_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FenceDone(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: int
    def __init__(self, fence: _Optional[int] = ...) -> None: ...

class Retired(_message.Message):
    __slots__ = ("segment_ids",)
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segment_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ToClient(_message.Message):
    __slots__ = ("ticket", "welcome", "segments", "fence", "retire", "refused")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    welcome: Welcome
    segments: Segments
    fence: Fence
    retire: Retire
    refused: Refused
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., segments: _Optional[_Union[Segments, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., retire: _Optional[_Union[Retire, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket", "valid_s", "boot_id", "version")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    VALID_S_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    valid_s: int
    boot_id: int
    version: _common_pb2.Version
    def __init__(self, ticket: _Optional[bytes] = ..., valid_s: _Optional[int] = ..., boot_id: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("boot_id", "version")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    version: _common_pb2.Version
    def __init__(self, boot_id: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "bytes", "slots")
    ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    bytes: int
    slots: int
    def __init__(self, id: _Optional[int] = ..., bytes: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class Segments(_message.Message):
    __slots__ = ("stamp", "slot_bytes", "shard_stride", "shards", "segments")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_STRIDE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    stamp: _common_pb2.Stamp
    slot_bytes: int
    shard_stride: int
    shards: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, stamp: _Optional[_Union[_common_pb2.Stamp, _Mapping]] = ..., slot_bytes: _Optional[int] = ..., shard_stride: _Optional[int] = ..., shards: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("fence", "session_below", "store_ids")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_BELOW_FIELD_NUMBER: _ClassVar[int]
    STORE_IDS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    session_below: int
    store_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fence: _Optional[int] = ..., session_below: _Optional[int] = ..., store_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Retire(_message.Message):
    __slots__ = ("segment_ids",)
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segment_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
