"""Neighbours of one major version understand each other: today's programs, and messages as they were.

`recorded/v1_0.binpb` holds the descriptors of protocol 1.0 (a FileDescriptorSet). It is never changed; a
later minor version that is released is recorded beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from kvhost_client import version
from kvhost_client.errors import VersionMismatch
from kvhost_client.handover import fetch_ticket
from kvhost_proto.v1 import common_pb2
from tests.client.engine import Engine, keys
from tests.proto.messages import descriptors, filled, parsed
from tests.support import Daemon, pat

RECORDED = sorted((Path(__file__).parent / "recorded").glob("v*.binpb"))


class Old:
    """The messages and calls of a protocol that was recorded."""

    def __init__(self, path: Path) -> None:
        recorded = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
        self.pool = DescriptorPool()
        for file in recorded.file:
            self.pool.Add(file)  # type: ignore[no-untyped-call]
        self.names = [
            f"{file.package}.{message.name}" for file in recorded.file for message in file.message_type
        ]

    def descriptor(self, name: str) -> Descriptor:
        found: Descriptor = self.pool.FindMessageTypeByName(name)  # type: ignore[no-untyped-call]
        return found

    def message(self, name: str, **fields: Any) -> Any:
        return GetMessageClass(self.descriptor(f"kvhost.v1.{name}"))(**fields)

    def call(self, channel: grpc.Channel, service: str, method: str) -> Any:
        """A call as that protocol's generated code makes it."""
        described = self.pool.FindServiceByName(f"kvhost.v1.{service}")  # type: ignore[no-untyped-call]
        one = described.methods_by_name[method]
        make = channel.unary_stream if one.server_streaming else channel.unary_unary
        return make(
            f"/kvhost.v1.{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(one.output_type).FromString,
        )


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def old(request: pytest.FixtureRequest) -> Old:
    return Old(request.param)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


def test_something_is_recorded() -> None:
    assert [path.stem for path in RECORDED] == ["v1_0"]


def test_every_message_of_then_is_read_now_and_the_other_way_round(old: Old) -> None:
    today = {descriptor.full_name: descriptor for descriptor in descriptors()}
    for name in old.names:
        then = old.descriptor(name)
        sent = filled(then)
        received = parsed(today[name], sent.SerializeToString())
        for field in then.fields:
            assert field.name in today[name].fields_by_name, f"{name}.{field.name}"
        assert parsed(then, received.SerializeToString()) == sent, name
        now = parsed(then, filled(today[name]).SerializeToString())
        for field in then.fields:
            if field.containing_oneof is None:
                assert str(getattr(now, field.name)), f"{name}.{field.name} of today is not read"


def test_a_client_of_then_works_with_todays_daemon(old: Old, daemon: Daemon) -> None:
    names = keys("shared", 3)
    with Engine(daemon.socket) as engine, grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        engine.store(names)
        ticket = fetch_ticket(daemon.handover_socket, pat("old", 0, 16), 5.0).ticket
        opening = old.message("OpenSessionRequest", ticket=ticket, version=old.message("Version", major=1))
        stream = old.call(channel, "Cache", "OpenSession")(opening)
        secret = next(stream).opened.session_id
        spec = old.message("NamespaceSpec")
        spec.ParseFromString(engine.spec.SerializeToString())
        declare = old.message("DeclareNamespaceRequest", session_id=secret, spec=spec)
        declared = old.call(channel, "Cache", "DeclareNamespace")(declare, timeout=5)
        assert (declared.digest, declared.existed) == (engine.declared.digest, True)
        chain = old.message("Chain", group=0, semantics=1, key_bytes=len(names[0]), keys=b"".join(names))
        query = old.message("LookupQuery", tag=7, chains=[chain])
        lookup = old.call(channel, "Cache", "Lookup")
        [answer] = lookup(old.message("LookupRequest", session_id=secret, queries=[query]), timeout=5).answers
        assert (answer.tag, answer.chains[0].found) == (7, b"\0")  # it has mapped nothing
        asked = old.message("LookupRequest", namespace=str(declared.namespace_number), queries=[query])
        [answer] = lookup(asked, timeout=5).answers
        assert answer.chains[0].found == b"\1\1\1"
        reserve = old.message("ReserveRequest", session_id=secret, count=1)
        assert old.call(channel, "Cache", "Reserve")(reserve, timeout=5).pending
        update = old.message("UpdateRequest", session_id=secret, releases=[5])
        [error] = old.call(channel, "Cache", "Update")(update, timeout=5).errors
        assert (error.id, error.code) == (5, 5)
        watch = old.call(channel, "Cache", "Watch")(old.message("WatchRequest"), timeout=5)
        assert next(watch).WhichOneof("kind") == "gap"
        watch.cancel()
        stream.cancel()
    with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
        status = old.call(channel, "Admin", "Status")(old.message("StatusRequest"), timeout=5)
        assert status.pid == daemon.pid
        assert status.namespaces[0].chunks == 3


@pytest.mark.parametrize("minor", [0, version.MINOR, version.MINOR + 1])
def test_another_minor_version_is_no_reason_to_refuse(minor: int) -> None:
    version.check(common_pb2.Version(major=version.MAJOR, minor=minor, program="kvhostd 9"), "there")


def test_another_major_version_is_refused_with_both_versions(daemon: Daemon) -> None:
    with pytest.raises(VersionMismatch) as refused:
        version.check(common_pb2.Version(major=2, minor=3, program="kvhostd 9"), "there")
    for part in ("2.3", "kvhostd 9", f"{version.MAJOR}.{version.MINOR}", version.program()):
        assert part in str(refused.value)
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        old = Old(RECORDED[0])
        theirs = old.message("Version", major=2, minor=3, program="kvhost 9")
        stream = old.call(channel, "Cache", "OpenSession")(old.message("OpenSessionRequest", version=theirs))
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    for part in ("'kvhost 9'", "2.3", "'kvhostd 0.1.0'", f"{version.MAJOR}.{version.MINOR}"):
        assert part in caught.value.details()
