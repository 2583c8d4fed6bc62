"""Every field number that was ever given away, kept in `field_numbers.json`; running this adds new ones.

A number once used stays with its name and type, or is reserved: an old peer must never read a new
meaning into it.
"""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

from tests.proto.messages import descriptors

FILE = Path(__file__).with_suffix(".json")

# Message to number to "name type".
Numbers = dict[str, dict[str, str]]

SCALARS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
}


def given() -> Numbers:
    recorded: Numbers = json.loads(FILE.read_text())
    return recorded


def current() -> Numbers:
    return {d.full_name: {str(f.number): f"{f.name} {kind(f)}" for f in d.fields} for d in descriptors()}


def reserved(descriptor: Descriptor) -> set[int]:
    proto = DescriptorProto()
    descriptor.CopyToProto(proto)
    return {number for span in proto.reserved_range for number in range(span.start, span.end)}


def kind(field: FieldDescriptor) -> str:
    """The type of a field as the wire sees it."""
    named = field.message_type or field.enum_type
    return str(named.full_name) if named is not None else SCALARS[field.type]


def main() -> None:
    known = given() if FILE.exists() else {}
    for message, numbers in current().items():
        # What is there stays as it is: a conflict is for the test to report.
        known[message] = {**numbers, **known.get(message, {})}
    ordered = {m: dict(sorted(n.items(), key=lambda item: int(item[0]))) for m, n in sorted(known.items())}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
