"""The rules of the wire: what a reviewer would otherwise have to look for in every change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

from tests.proto import field_numbers
from tests.proto.messages import FILES, descriptors

PROTO = Path(__file__).resolve().parents[2] / "proto" / "kvhost_proto" / "v1"
SECRETS_AND_HASHES = re.compile(r"(^|_)(keys?|hash|digest|parents?|token|ticket|session_id|instance_id)$")


def fields() -> Iterator[FieldDescriptor]:
    for descriptor in descriptors():
        if not descriptor.GetOptions().map_entry:
            yield from descriptor.fields


def enums() -> Iterator[EnumDescriptor]:
    for file in FILES:
        yield from file.enum_types_by_name.values()


def test_one_versioned_package() -> None:
    assert {file.package for file in FILES} == {"kvhost.v1"}
    assert {Path(file.name).parent.as_posix() for file in FILES} == {"kvhost_proto/v1"}
    assert {Path(file.name).name for file in FILES} == {path.name for path in PROTO.glob("*.proto")}


def test_enums_start_unspecified_and_carry_their_name() -> None:
    for enum in enums():
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].number == 0
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values), enum.name


def test_names_are_in_one_style() -> None:
    for field in fields():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", field.name), field.full_name
    for descriptor in descriptors():
        assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", descriptor.name), descriptor.full_name


def test_every_method_has_its_own_request_and_reply() -> None:
    streamed = {"OpenSession": "Notice", "Watch": "WatchEvent"}
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                assert method.input_type.name == f"{method.name}Request"
                assert method.output_type.name == streamed.get(method.name, f"{method.name}Reply")


def test_engines_are_told_whose_answer_it_is() -> None:
    cache = next(file for file in FILES if file.name.endswith("cache.proto"))
    for method in cache.services_by_name["Cache"].methods:
        assert "stamp" in method.output_type.fields_by_name, (
            f"{method.full_name} answers without a Stamp (I6)"
        )


def test_hashes_and_secrets_are_bytes_to_machines_and_hex_to_people() -> None:
    for field in fields():
        if SECRETS_AND_HASHES.search(field.name) and field.message_type is None:
            wanted = "string" if field.file.name.endswith("admin.proto") else "bytes"
            assert field_numbers.kind(field) == wanted, field.full_name


def test_no_field_number_is_used_twice() -> None:
    found = field_numbers.current()
    reserved = {descriptor.full_name: field_numbers.reserved(descriptor) for descriptor in descriptors()}
    for message, fields_given in field_numbers.given().items():
        for number, was in fields_given.items():
            now = found.get(message, {}).get(number)
            if now is None:
                free = int(number) not in reserved.get(message, set())
                assert not free, f"{message} lost field {number} ({was}): reserve the number"
            else:
                assert now == was, (
                    f"field {number} of {message} was {was!r} and is {now!r}: take a new number"
                )


def test_every_field_number_is_written_down() -> None:
    given = field_numbers.given()
    for message, found in field_numbers.current().items():
        new = found.keys() - given.get(message, {}).keys()
        assert not new, f"{message} has new fields {sorted(new)}: run `make proto`"
