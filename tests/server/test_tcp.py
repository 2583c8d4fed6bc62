"""The TCP port: closed unless asked for, never without certificates on both sides; nothing on it holds."""

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, common_pb2
from kvhost_server.cli import main
from kvhost_server.exits import ExitCode
from kvhost_server.listener import Address
from tests.client.engine import KEY_BYTES, Engine, keys
from tests.server.test_by_hand import GRPCURL
from tests.support import Daemon, fd_count, wait_for
from tests.support.certificates import Authority, Pair

DEADLINE_S = 5.0
OURS, THEIRS = Authority("ours"), Authority("theirs")


def tcp_options(folder: Path, address: str = "127.0.0.1:0") -> list[str]:
    """The options of a daemon with a TCP port, and the files that they name."""
    cert, key = OURS.server().write(folder, "server")
    (folder / "ca.pem").write_bytes(OURS.pem)
    files = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(folder / "ca.pem")]
    return ["--tcp", address, *files]


def port_of(daemon: Daemon) -> int:
    found = re.search(r"other hosts are served on 127\.0\.0\.1:(\d+)", daemon.log)
    assert found, daemon.log
    return int(found.group(1))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = tcp_options(tmp_path_factory.mktemp("tls"))
    with Daemon("8MiB", ["--segment-size", "1MiB", *options]) as running:
        yield running


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    """A client with a certificate of ours."""
    with open_channel(port_of(daemon), OURS.client()) as opened:
        yield opened


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    with Engine(daemon.socket) as attached:
        yield attached


def open_channel(port: int, pair: Pair | None, trust: bytes = OURS.pem) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(trust, pair and pair.key, pair and pair.cert)
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)


def status_over(channel: grpc.Channel) -> admin_pb2.StatusReply:
    reply: admin_pb2.StatusReply = admin_pb2_grpc.AdminStub(channel).Status(
        admin_pb2.StatusRequest(), timeout=DEADLINE_S
    )
    return reply


class TestWhoIsServed:
    def test_a_client_with_our_certificate(self, daemon: Daemon, channel: grpc.Channel) -> None:
        assert status_over(channel).pid == daemon.pid
        assert daemon.status().config["tcp"] == "127.0.0.1:0"

    @pytest.mark.parametrize(
        "pair",
        [
            pytest.param(lambda: None, id="without a certificate"),
            pytest.param(THEIRS.client, id="of another authority"),
            pytest.param(lambda: OURS.client(days_ago=9), id="expired"),
            pytest.param(lambda: OURS.client(days_ago=-9), id="not valid yet"),
            pytest.param(OURS.server, id="for servers only"),
        ],
    )
    def test_nobody_else(self, daemon: Daemon, pair: Callable[[], Pair | None]) -> None:
        with open_channel(port_of(daemon), pair()) as channel, pytest.raises(grpc.RpcError) as caught:
            status_over(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    def test_not_without_tls(self, daemon: Daemon) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port_of(daemon)}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                status_over(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    def test_a_client_that_does_not_trust_us_says_nothing(self, daemon: Daemon) -> None:
        port = port_of(daemon)
        with open_channel(port, OURS.client(), THEIRS.pem) as channel, pytest.raises(grpc.RpcError):
            status_over(channel)

    def test_silent_connections_are_closed_and_bar_nobody(
        self, daemon: Daemon, channel: grpc.Channel
    ) -> None:
        status_over(channel)
        before = fd_count(daemon.pid)
        silent = [socket.create_connection(("127.0.0.1", port_of(daemon))) for _ in range(50)]
        try:
            wait_for(lambda: fd_count(daemon.pid) >= before + 50, DEADLINE_S)
            with open_channel(port_of(daemon), OURS.client()) as other:
                status_over(other)
            wait_for(lambda: fd_count(daemon.pid) <= before + 1, 3 * DEADLINE_S)
        finally:
            for connection in silent:
                connection.close()


class TestWhatIsServed:
    def test_it_describes_itself(self, channel: grpc.Channel) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S)
        assert {service.name for service in reply.list_services_response.service} == {
            "kvhost.v1.Admin",
            "kvhost.v1.Cache",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }

    def test_by_hand(self, daemon: Daemon, tmp_path: Path) -> None:
        """The command of SECURITY.md."""
        (tmp_path / "ca.pem").write_bytes(OURS.pem)
        cert, key = OURS.client().write(tmp_path, "client")
        command = [
            *(GRPCURL, "-cacert", str(tmp_path / "ca.pem"), "-cert", str(cert), "-key", str(key)),
            *(f"127.0.0.1:{port_of(daemon)}", "kvhost.v1.Admin/Status"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["pid"] == daemon.pid

    def test_health(self, channel: grpc.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "liveness", "kvhost.v1.Cache", "kvhost.v1.Admin"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING

    def test_a_lookup_names_a_namespace_and_holds_nothing(
        self, daemon: Daemon, engine: Engine, channel: grpc.Channel
    ) -> None:
        names = keys("remote", 3)
        engine.store(names)
        before = daemon.status()
        stub = cache_pb2_grpc.CacheStub(channel)
        digest = engine.declared.digest.hex()
        for namespace in (str(engine.declared.namespace_number), digest[:12], digest):
            reply = stub.Lookup(lookup(namespace, [*names, *keys("absent", 2)]), timeout=DEADLINE_S)
            (answer,) = reply.answers
            assert [bytes(chain.found) for chain in answer.chains] == [b"\1\1\1\0"]
            assert answer.chains[0].first_pin_id == 0
            assert not answer.chains[0].slots
            assert (reply.stamp.boot_id, reply.stamp.generation) == (engine.session.boot_id, 1)
        after = daemon.status()
        assert list(after.namespaces) == list(before.namespaces)  # no hit was counted for an engine
        assert after.counters["advised_chunks"] == before.counters["advised_chunks"] + 15

    def test_a_key_being_written_is_said_to_be(self, engine: Engine, channel: grpc.Channel) -> None:
        (name,) = keys("half-written", 1)
        ((store, _),) = engine.grant(1)
        from kvhost_client.types import Chunk

        engine.session.assign(store, Chunk(0, name))
        request = lookup(str(engine.declared.namespace_number), [name])
        reply = cache_pb2_grpc.CacheStub(channel).Lookup(request, timeout=DEADLINE_S)
        assert reply.answers[0].chains[0].found == b"\2"
        engine.session.abort(store)

    def test_a_watch_follows_the_keys(self, engine: Engine, channel: grpc.Channel) -> None:
        number = str(engine.declared.namespace_number)
        stream = cache_pb2_grpc.CacheStub(channel).Watch(
            cache_pb2.WatchRequest(namespace=number), timeout=4 * DEADLINE_S
        )
        events = iter(stream)
        while not next(events).HasField("synced"):
            pass
        names = keys("followed", 2)
        engine.store(names)
        assert next(events).stored.keys == b"".join(names)
        stream.cancel()

    @pytest.mark.parametrize(
        ("method", "request_type"),
        [
            ("Ping", cache_pb2.PingRequest),
            ("DeclareNamespace", cache_pb2.DeclareNamespaceRequest),
            ("Reserve", cache_pb2.ReserveRequest),
            ("Update", cache_pb2.UpdateRequest),
            ("Reset", cache_pb2.ResetRequest),
        ],
    )
    def test_what_belongs_to_a_session_is_refused(
        self, channel: grpc.Channel, method: str, request_type: type
    ) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(cache_pb2_grpc.CacheStub(channel), method)(request_type(), timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "over its Unix sockets" in (caught.value.details() or "")

    def test_no_stream_of_questions_is_served(self, channel: grpc.Channel) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            next(
                cache_pb2_grpc.CacheStub(channel).Exchange(
                    iter([cache_pb2.ExchangeRequest()]), timeout=DEADLINE_S
                )
            )
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

    def test_no_session_is_opened(self, daemon: Daemon, channel: grpc.Channel) -> None:
        from kvhost_client.handover import fetch_ticket

        ticket = fetch_ticket(daemon.handover_socket, b"i" * 16, DEADLINE_S).ticket
        request = cache_pb2.OpenSessionRequest(ticket=ticket, version=common_pb2.Version(major=1))
        with pytest.raises(grpc.RpcError) as caught:
            next(cache_pb2_grpc.CacheStub(channel).OpenSession(request, timeout=DEADLINE_S))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not daemon.status().sessions

    def test_nothing_is_pinned_and_no_session_is_used(self, engine: Engine, channel: grpc.Channel) -> None:
        number = str(engine.declared.namespace_number)
        stub = cache_pb2_grpc.CacheStub(channel)
        secret = engine.session._connection.session_id
        for request, code in (
            (lookup(number, keys("a", 1), pin=True), grpc.StatusCode.PERMISSION_DENIED),
            (lookup("", keys("a", 1), session_id=secret), grpc.StatusCode.PERMISSION_DENIED),
            (lookup(number, keys("a", 1), session_id=secret, pin=True), grpc.StatusCode.PERMISSION_DENIED),
            (lookup("", keys("a", 1)), grpc.StatusCode.INVALID_ARGUMENT),
            (lookup("no such", keys("a", 1)), grpc.StatusCode.NOT_FOUND),
            (lookup(number, [b"short"]), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Lookup(request, timeout=DEADLINE_S)
            assert caught.value.code() is code


class TestStart:
    def test_nothing_listens_unless_asked(self) -> None:
        with Daemon("4MiB") as plain:
            inodes = {
                line.split()[9]
                for table in ("tcp", "tcp6")
                for line in Path(f"/proc/{plain.pid}/net/{table}").read_text().splitlines()[1:]
            }
            sockets = [path.readlink().name for path in Path(f"/proc/{plain.pid}/fd").iterdir()]
            assert not [name for name in sockets if name.removeprefix("socket:[").rstrip("]") in inodes]

    @pytest.mark.parametrize(
        ("drop", "parts"),
        [
            (
                ["--tls-cert", "--tls-key", "--tls-client-ca"],
                ["--tls-cert and --tls-key and --tls-client-ca"],
            ),
            (
                ["--tls-client-ca"],
                ["--tcp", "--tls-client-ca must be given too", "without TLS on both sides"],
            ),
            (["--tls-key"], ["--tcp", "--tls-key must be given too"]),
            (["--tcp"], ["--tls-cert", "--tcp HOST:PORT is not given"]),
        ],
    )
    def test_all_of_the_options_or_none(
        self, drop: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = tcp_options(tmp_path)
        for flag in drop:
            at = options.index(flag)
            del options[at : at + 2]
        assert main(["--memory", "4MiB", *options, "--check-config"]) == ExitCode.USAGE
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        for part in parts:
            assert part in error

    @pytest.mark.parametrize(
        "text", ["9443", ":9443", "host:", "host:70000", "::1:9443", "[]:1", "host:x", ""]
    )
    def test_an_address_is_a_host_and_a_port(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"is not HOST:PORT; write it as in 10\.0\.0\.5:9443"):
            Address.parse(text)

    @pytest.mark.parametrize("text", ["0.0.0.0:1", "[::1]:9443", "cache.example:65535"])
    def test_an_address_reads_back(self, text: str) -> None:
        assert str(Address.parse(text)) == text

    @pytest.mark.parametrize(
        ("spoil", "parts"),
        [
            (lambda d: (d / "server.key").unlink(), ["--tls-key", "server.key cannot be read: No such file"]),
            (lambda d: (d / "server.pem").write_text("no PEM"), ["--tls-cert", "do not serve", "give a PEM"]),
            (
                lambda d: THEIRS.server().write(d, "other")[1].rename(d / "server.key"),
                ["do not serve (KEY_VALUES_MISMATCH)", "its own unencrypted PEM key"],
            ),
            (lambda d: (d / "ca.pem").write_text(""), ["--tls-client-ca", "holds no certificate"]),
        ],
    )
    def test_files_that_are_not_what_they_should_be(
        self, spoil: Callable[[Path], object], parts: list[str], tmp_path: Path
    ) -> None:
        options = tcp_options(tmp_path)
        spoil(tmp_path)
        with Daemon("4MiB", options, wait=False) as daemon:
            one_line(daemon, ExitCode.CONFIG, parts)

    def test_a_key_that_others_may_read_is_named(self, daemon: Daemon, tmp_path: Path) -> None:
        assert "is open to other users" not in daemon.log
        options = tcp_options(tmp_path)
        (tmp_path / "server.key").chmod(0o644)
        with Daemon("4MiB", options) as careless:
            assert "server.key is open to other users (mode 0644); chmod 0600 it" in careless.log

    def test_an_address_that_is_taken(self, tmp_path: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as other:
            address = f"127.0.0.1:{other.getsockname()[1]}"
            with Daemon("4MiB", tcp_options(tmp_path, address), wait=False) as daemon:
                parts = [f"--tcp {address} cannot be listened on: Address already in use", "choose another"]
                one_line(daemon, ExitCode.UNAVAILABLE, parts)

    def test_a_host_that_is_not_ours(self, tmp_path: Path) -> None:
        with Daemon("4MiB", tcp_options(tmp_path, "no-such-host.invalid:1"), wait=False) as daemon:
            one_line(daemon, ExitCode.UNAVAILABLE, ["--tcp no-such-host.invalid:1 cannot be listened on"])


def one_line(daemon: Daemon, code: ExitCode, parts: list[str]) -> None:
    assert daemon.wait_end() == code, daemon.log
    assert daemon.log.startswith("kvhostd: ")
    assert daemon.log.count("\n") == 1, daemon.log
    for part in parts:
        assert part in daemon.log
    assert not list(daemon.folder.glob("*.sock"))


def lookup(namespace: str, names: list[bytes], **fields: object) -> cache_pb2.LookupRequest:
    chain = cache_pb2.Chain(
        group=0, semantics=common_pb2.SEMANTICS_PREFIX, key_bytes=KEY_BYTES, keys=b"".join(names)
    )
    query = cache_pb2.LookupQuery(tag=1, chains=[chain])
    return cache_pb2.LookupRequest(namespace=namespace, queries=[query], **fields)  # type: ignore[arg-type]
