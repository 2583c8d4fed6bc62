"""A whole daemon: open at once, serving when populated, gone without a trace."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvhost_proto.v1 import admin_pb2, cache_pb2, cache_pb2_grpc, common_pb2
from tests.client.engine import Engine
from tests.server.hosts import MIB, cgroup_v2
from tests.server.test_pool import punch_hole
from tests.support import (
    Daemon,
    children,
    fd_count,
    map_count,
    memory_kib,
    thread_count,
    wait_for,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("16MiB", ["--segment-size", "2MiB"]) as running:
        yield running


@pytest.fixture
def cramped(tmp_path: Path) -> Path:
    """A host without room, as a `--cgroup-root`; give it room with `make_room`."""
    return cgroup_v2(tmp_path / "cgroup", limit=100 * MIB, current=100 * MIB)


def make_room(cgroup: Path) -> None:
    (cgroup / "memory.current").write_text("0")


def ping(daemon: Daemon) -> cache_pb2.PingReply:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        reply: cache_pb2.PingReply = cache_pb2_grpc.CacheStub(channel).Ping(
            cache_pb2.PingRequest(), timeout=5
        )
        return reply


def segments_of(pid: int) -> set[int]:
    """Inodes of the segments that a process has open."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if "memfd:kvhost-" in os.readlink(fd):
                found.add(fd.stat().st_ino)
    return found


def held_anywhere() -> set[int]:
    """Inodes of the segments that any process has open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found |= segments_of(int(process.name))
            maps = (process / "maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in maps if "memfd:kvhost-" in line}
    return found


class TestStart:
    def test_the_port_is_open_at_once_and_health_follows_populate(self, cramped: Path) -> None:
        began = time.monotonic()
        with Daemon("8MiB", ["--cgroup-root", str(cramped)], wait=False) as daemon:
            wait_for(lambda: daemon.health("liveness") == SERVING)
            opened_s = time.monotonic() - began
            for service in ("", "kvhost.v1.Cache"):
                assert daemon.health(service) == NOT_SERVING
            assert daemon.health("kvhost.v1.Admin", daemon.admin_socket) == SERVING
            assert ping(daemon).state == common_pb2.SERVICE_STATE_STARTING
            assert ping(daemon).populated == 0.0
            assert daemon.status().memory.populated_bytes == 0
            make_room(cramped)
            daemon.wait_serving()
            assert daemon.health("kvhost.v1.Cache") == SERVING
            assert ping(daemon).populated == 1.0
            memory = daemon.status().memory
            assert (memory.asked_bytes, memory.capacity_bytes, memory.populated_bytes) == (8 * MIB,) * 3
            assert opened_s < 2.0  # 0.5 s where nothing else runs; tests share their cores

    def test_it_is_small_and_loads_no_accelerator_library(self, daemon: Daemon) -> None:
        assert memory_kib(daemon.pid) <= 60 * 1024
        for library in ("libcuda", "libtorch", "jaxlib", "libtpu", "numpy"):
            assert map_count(daemon.pid, library) == 0
        assert map_count(daemon.pid, "memfd:kvhost") == 0

    @pytest.mark.parametrize("socket", ["cache", "admin"])
    def test_each_server_describes_itself(self, daemon: Daemon, socket: str) -> None:
        path, own = {
            "cache": (daemon.socket, "kvhost.v1.Cache"),
            "admin": (daemon.admin_socket, "kvhost.v1.Admin"),
        }[socket]
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            (reply,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
        names = {service.name for service in reply.list_services_response.service}
        assert names == {
            own,
            "grpc.health.v1.Health",
            "grpc.channelz.v1.Channelz",
            "grpc.reflection.v1alpha.ServerReflection",
        }

    def test_a_second_daemon_does_not_disturb_the_first(self, daemon: Daemon) -> None:
        with Daemon("4MiB", folder=daemon.folder, wait=False) as second:
            assert second.wait_end() == 69
            assert second.log == (
                f"kvhostd: already running, pid {daemon.pid}, on --socket {daemon.socket}; stop it, or "
                "choose "
                "another --socket\n"
            )
        assert daemon.health() == SERVING
        assert daemon.status().pid == daemon.pid

    def test_another_daemons_admin_socket_is_left_alone(self, daemon: Daemon, tmp_path: Path) -> None:
        options = ["--admin-socket", daemon.admin_socket]
        with Daemon("4MiB", options, folder=tmp_path, wait=False) as second:
            assert second.wait_end() == 69
            assert "another process listens on" in second.log
        assert daemon.status().pid == daemon.pid

    def test_after_sigkill_it_starts_again_at_once(self, daemon: Daemon) -> None:
        boot = daemon.status().boot_id
        daemon.kill()
        assert Path(daemon.socket).exists()
        with Daemon("4MiB", folder=daemon.folder) as second:
            assert second.status().boot_id != boot

    def test_when_nothing_fits_in_time_a_later_start_may_succeed(self, tmp_path: Path) -> None:
        cgroup = cgroup_v2(tmp_path / "cgroup", limit=100 * MIB, current=100 * MIB)
        options = ["--cgroup-root", str(cgroup), "--segment-size", "2MiB", "--memory-wait", "0.5"]
        with Daemon("8MiB", options, wait=False) as daemon:
            assert daemon.wait_end() == 75
            assert "0 B of 8MiB (--memory) could be had within 0.5 s" in daemon.log.splitlines()[-1]

    def test_sigterm_while_it_waits_for_room(self, cramped: Path) -> None:
        with Daemon("8MiB", ["--cgroup-root", str(cramped)], wait=False) as daemon:
            (helper,) = wait_for(lambda: children(daemon.pid, "populate.py"))
            assert daemon.stop() == 0
            assert not Path(f"/proc/{helper}").exists()
            assert sorted(p.suffix for p in daemon.folder.iterdir()) == [".lock", ".log"]

    def test_a_killed_helper_is_one_line(self, cramped: Path) -> None:
        with Daemon("8MiB", ["--cgroup-root", str(cramped)], wait=False) as daemon:
            (helper,) = wait_for(lambda: children(daemon.pid, "populate.py"))
            os.kill(helper, signal.SIGKILL)
            assert daemon.wait_end() == 71
            last = daemon.log.splitlines()[-1]
            assert last.startswith("kvhostd: populating --memory 8MiB was ended by signal 9 after 0 B; ")
            assert f"{cramped}/memory.max" in last
            assert "Traceback" not in daemon.log


class TestEnd:
    def test_sigterm_removes_the_sockets(self, daemon: Daemon) -> None:
        assert daemon.stop() == 0
        assert sorted(p.name for p in daemon.folder.iterdir() if p.suffix != ".log") == ["kvhostd.sock.lock"]
        assert "going down: got SIGTERM" in daemon.log

    def test_sessions_are_told(self, daemon: Daemon) -> None:
        with Engine(daemon.socket) as engine:
            daemon.stop()
            wait_for(lambda: any(notice.HasField("going_down") for notice in engine.notices))
            wait_for(lambda: engine.ends)

    def test_a_second_sigterm_hurries(self, daemon: Daemon) -> None:
        """A Watch never ends by itself, so the first signal alone takes the whole grace."""
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            stream = cache_pb2_grpc.CacheStub(channel).Watch(cache_pb2.WatchRequest(), timeout=30)
            reader = threading.Thread(target=_drain, args=(stream,))
            reader.start()
            daemon.process.terminate()
            daemon.wait_log("going down")
            daemon.process.terminate()
            assert daemon.wait_end() == 0
            reader.join(10)
        assert not Path(daemon.socket).exists()

    def test_nothing_is_left_after_sigkill(self) -> None:
        """Segments have no name: their memory goes with the last process that holds them (C5)."""
        with Daemon("16MiB", ["--segment-size", "2MiB"]) as daemon, Engine(daemon.socket) as engine:
            inodes = segments_of(daemon.pid)
            assert len(inodes) == 8
            daemon.kill()
            wait_for(lambda: engine.ends)
        wait_for(lambda: not inodes & held_anywhere(), what="nobody to hold a segment")
        assert not [name for name in os.listdir("/dev/shm") if "kvhost" in name]


class TestService:
    def test_engines_come_and_go_without_a_trace(self, daemon: Daemon) -> None:
        with Engine(daemon.socket) as first:
            first.session.ping()
        wait_for(lambda: not daemon.status().sessions)
        before = (fd_count(daemon.pid), map_count(daemon.pid), thread_count(daemon.pid))
        for _ in range(5):
            with Engine(daemon.socket, ranks=2) as engine:
                engine.session.ping()

        def settled() -> bool:
            now = (fd_count(daemon.pid), map_count(daemon.pid), thread_count(daemon.pid))
            return not daemon.status().sessions and all(n <= b + 1 for n, b in zip(now, before, strict=True))

        wait_for(settled, 10, f"descriptors, maps and threads to be back at {before}")
        daemon.check_integrity()

    def test_a_hole_in_a_segment_is_detected_and_counted(self, daemon: Daemon) -> None:
        with Engine(daemon.socket) as engine:
            generation = daemon.status().namespaces[0].generation
            fds = [f"/proc/{daemon.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{daemon.pid}/fd")]
            segments = sorted(path for path in fds if "memfd:kvhost-" in os.readlink(path))
            assert len(segments) == 8
            for path in segments:
                fd = os.open(path, os.O_RDWR)
                punch_hole(fd, 0, 4096)
                os.close(fd)
            wait_for(lambda: daemon.status().anomalies["hole_detected"] >= 1, 10)
            wait_for(lambda: daemon.status().namespaces[0].generation > generation)
            wait_for(lambda: all(os.stat(path).st_blocks * 512 == 2 * MIB for path in segments), 10)
            engine.session.ping()
        daemon.check_integrity()

    def test_drain_and_resume_move_health(self, daemon: Daemon) -> None:
        from kvhost_proto.v1 import admin_pb2_grpc

        with grpc.insecure_channel(f"unix:{daemon.admin_socket}") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            stub.Drain(admin_pb2.DrainRequest(), timeout=5)
            wait_for(lambda: daemon.health() == NOT_SERVING)
            assert daemon.health("liveness") == SERVING
            stub.Drain(admin_pb2.DrainRequest(resume=True), timeout=5)
            wait_for(lambda: daemon.health() == SERVING)

    def test_a_client_that_pings_every_second_keeps_its_call(self, daemon: Daemon) -> None:
        """With gRPC's default options the server hangs up within 5 s: "too many pings" (F12)."""
        options = [
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        with grpc.insecure_channel(f"unix:{daemon.socket}", options=options) as channel:
            stream = cache_pb2_grpc.CacheStub(channel).Watch(cache_pb2.WatchRequest(), timeout=7)
            with pytest.raises(grpc.RpcError) as caught:
                for _ in stream:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _drain(stream: Iterator[object]) -> None:
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        return
