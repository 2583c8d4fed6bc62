"""Every Admin method can be typed by hand: the real grpcurl against the real daemon, with reflection only."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhost_proto.v1 import admin_pb2
from tests.client.engine import Engine, keys
from tests.support import Daemon

GRPCURL = str(Path(sys.executable).with_name("grpcurl"))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


def grpcurl(
    daemon: Daemon, *words: str, data: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    given = ["-d", json.dumps(data)] if data is not None else []
    command = [GRPCURL, "-plaintext", "-unix", *given, daemon.admin_socket, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def ask(daemon: Daemon, method: str, **data: Any) -> dict[str, Any]:
    done = grpcurl(daemon, f"kvhost.v1.Admin/{method}", data=data)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_list_and_describe_say_what_there_is(daemon: Daemon) -> None:
    services = grpcurl(daemon, "list").stdout.split()
    assert {"kvhost.v1.Admin", "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= set(services)
    described = grpcurl(daemon, "describe", "kvhost.v1.Admin").stdout
    methods = [line.split()[1] for line in described.splitlines() if line.strip().startswith("rpc ")]
    assert "Status" in methods
    assert len(methods) == len(admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods)
    health = grpcurl(daemon, "grpc.health.v1.Health/Check", data={"service": "kvhost.v1.Admin"})
    assert json.loads(health.stdout) == {"status": "SERVING"}


def test_every_method_by_hand(daemon: Daemon) -> None:
    names = keys("by hand", 3)
    with Engine(daemon.socket, model="by hand") as engine:
        engine.store(names)
        status = ask(daemon, "Status")
        assert status["counters"]["committed_chunks"] == "3"
        (namespace,) = ask(daemon, "ListNamespaces")["namespaces"]
        assert namespace["chunks"] == "3"
        assert namespace["parts"] == [{"name": "model", "value": '"by hand"'}]
        (session,) = ask(daemon, "ListSessions")["sessions"]
        assert session["state"] == "open"
        assert session["mappings"][0]["access"] == "cpu"

        chunks = ask(daemon, "LookupChunks", keys=[names[1].hex(), bytes(36).hex()])["chunks"]
        assert chunks[0]["state"] == "ready"
        assert chunks[0]["parent"] == names[0].hex()
        assert chunks[0]["children"] == 1
        assert chunks[1] == {"key": bytes(36).hex(), "state": "absent"}

        pins = engine.session.pin(0, names)
        assert ask(daemon, "Evict", keys=[names[2].hex()]) == {"held": "1"}
        engine.session.release(pins)
        assert ask(daemon, "Evict", namespace="1", keys=[names[2].hex()]) == {"evicted": "1"}
        assert ask(daemon, "ResetNamespace", namespace=namespace["digest"][:8])["dropped"] == "2"
        limits = ask(daemon, "SetLimits", namespace="1", floor_bytes=1 << 20, cap_bytes=3 << 20)
        assert limits == {"floor_segments": 1, "cap_segments": 3}
        assert ask(daemon, "Drain") == {"state": "SERVICE_STATE_DRAINING"}
        assert ask(daemon, "Drain", resume=True) == {"state": "SERVICE_STATE_SERVING"}
        assert ask(daemon, "CheckIntegrity") == {"ok": True}
        ask(daemon, "EndSession", number=int(session["number"]))
        remaining = ask(daemon, "ListSessions").get("sessions", [])
        assert all(s["state"] == "ended" for s in remaining)


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        ("LookupChunks", {"namespace": "77", "keys": []}, "matches 0"),
        ("LookupChunks", {"keys": ["xyz"]}, "not hexadecimal"),
        ("LookupChunks", {"keys": ["ab"]}, "have 36"),
        ("Evict", {}, "name keys, or ask for all"),
        ("EndSession", {"number": 99}, "session 99 is not open"),
        ("SetLimits", {"floor_bytes": 1 << 40}, "allowed are at most"),
        ("ResizePool", {}, "a pool of 0 B; allowed is 1MiB at least"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    daemon: Daemon, method: str, data: dict[str, Any], words: str
) -> None:
    with Engine(daemon.socket, model="by hand"):
        done = grpcurl(daemon, f"kvhost.v1.Admin/{method}", data=data)
    assert done.returncode != 0
    (message,) = [line for line in done.stderr.splitlines() if "Message:" in line]
    assert words in message
