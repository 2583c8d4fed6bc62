"""Every message of kvhost.v1, filled with values that differ from field to field.

Needs nothing but protobuf and `kvhost_proto`, so that it also runs in environments that hold little
else: `python messages.py` prints the runtime's version and the bytes of every message in hex, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import google.protobuf
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvhost_proto.v1 import admin_pb2, cache_pb2, common_pb2, handover_pb2

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (common_pb2, cache_pb2, admin_pb2, handover_pb2)
]


def descriptors() -> Iterator[Descriptor]:
    for file in FILES:
        yield from file.message_types_by_name.values()


def filled(descriptor: Descriptor) -> Message:
    """A message with every field set; of a oneof, the one with the highest number."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        _fill(message, field)
    return message


def parsed(descriptor: Descriptor, data: bytes) -> Message:
    message = GetMessageClass(descriptor)()
    message.ParseFromString(data)
    return message


def _fill(message: Message, field: FieldDescriptor) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        getattr(message, field.name).update({f"{field.name} é": _value(kind.fields_by_name["value"])})
    elif kind is not None and _repeated(field):
        getattr(message, field.name).extend([filled(kind), filled(kind)])
    elif kind is not None:
        getattr(message, field.name).CopyFrom(filled(kind))
    elif _repeated(field):
        getattr(message, field.name).extend([_value(field), _value(field)])
    else:
        setattr(message, field.name, _value(field))


def _value(field: FieldDescriptor) -> object:
    """A value of the field's type that is unlike that of its neighbours, and as wide as the type."""
    number = field.number
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    return {
        FieldDescriptor.TYPE_BOOL: True,
        FieldDescriptor.TYPE_BYTES: bytes((number * 31 + i) % 255 + 1 for i in range(40)),
        FieldDescriptor.TYPE_STRING: f"{field.full_name} ü",
        FieldDescriptor.TYPE_DOUBLE: number + 0.125,
        FieldDescriptor.TYPE_UINT32: (1 << 32) - number,
        FieldDescriptor.TYPE_UINT64: (1 << 64) - number,
        FieldDescriptor.TYPE_FIXED64: (1 << 64) - number,
    }[field.type]


def _repeated(field: FieldDescriptor) -> bool:
    # Protobuf 7 has no `label` any more, 6.30 has no `is_repeated` yet.
    known = getattr(field, "is_repeated", None)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED if known is None else known)


def main() -> None:
    found = {}
    for descriptor in descriptors():
        message = filled(descriptor)
        data = message.SerializeToString(deterministic=True)
        if parsed(descriptor, data) != message:
            raise SystemExit(f"{descriptor.full_name} does not survive the round trip")
        found[descriptor.full_name] = data.hex()
    print(json.dumps({"protobuf": google.protobuf.__version__, "messages": found}))


if __name__ == "__main__":
    main()
