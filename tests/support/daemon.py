"""A real kvhostd in a process of its own, on sockets in a folder of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvhost_client.paths import grpc_target
from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc
from tests.support.waiting import wait_for
from tests.support.weight import weigh_as_service

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0


class Daemon:
    """Starts kvhostd; use it in a `with`, which ends it and removes its folder.

    Args:
        memory: `--memory`.
        options: further flags, as ("--lock", "auto"). Without --metrics among them there is no HTTP port.
        folder: where the sockets stand; a new folder under the temp dir when not given (then removed at
        the end).
            Give the same one to a second daemon to take the first one's place.
        env: added to the environment.
        wait: return only once it is SERVING.
        prefix: a command to run it under, as ("setpriv", "--reuid=65534").

    Raises:
        AssertionError: it ended, or was not SERVING in time; the message has its log.
    """

    def __init__(
        self,
        memory: str = "4MiB",
        options: Sequence[str] = (),
        *,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
        prefix: Sequence[str] = (),
    ) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kvhost-"))
        self.socket = str(self.folder / "kvhostd.sock")
        self.admin_socket = str(self.folder / "kvhostd-admin.sock")
        self.handover_socket = str(self.folder / "kvhostd-handover.sock")
        self._log_path = self.folder / f"kvhostd-{os.urandom(4).hex()}.log"
        self.command = [
            *prefix,
            *(sys.executable, "-m", "kvhost_server", "--memory", memory, "--socket", self.socket),
            *(() if "--metrics" in options else ("--metrics", "off")),
            *options,
        ]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_clean_environment(), **(env or {})},
                start_new_session=True,
            )
        weigh_as_service(self.process.pid)
        if wait:
            try:
                self.wait_serving()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._log_path.read_text(errors="replace")

    def wait_serving(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns once the health service says SERVING."""

        def serving() -> bool:
            assert self.returncode is None, f"kvhostd ended with {self.returncode}: {self.log}"
            return bool(self.health() == health_pb2.HealthCheckResponse.SERVING)

        try:
            wait_for(serving, deadline_s, "kvhostd to be SERVING")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from error

    def health(self, service: str = "", socket: str | None = None) -> int | None:
        """The health status of a service; None when nobody answers."""
        with _channel(socket or self.socket) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=2.0
                )
            except grpc.RpcError:
                return None
            status: int = reply.status
            return status

    def status(self) -> admin_pb2.StatusReply:
        """What Admin says of the daemon: memory, namespaces, sessions, counters, anomalies."""
        with _channel(self.admin_socket) as channel:
            reply: admin_pb2.StatusReply = admin_pb2_grpc.AdminStub(channel).Status(
                admin_pb2.StatusRequest(), timeout=5.0
            )
            return reply

    def check_integrity(self) -> None:
        """Raises AssertionError when the manager's own books do not agree."""
        with _channel(self.admin_socket) as channel:
            reply = admin_pb2_grpc.AdminStub(channel).CheckIntegrity(
                admin_pb2.CheckIntegrityRequest(), timeout=30.0
            )
        assert reply.ok, list(reply.problems)

    @property
    def url(self) -> str:
        """Where its HTTP port is; it must have been asked for."""
        found = re.search(r"metrics on (http://\S+)/metrics", self.wait_log("a page for people on"))
        assert found is not None
        return found.group(1)

    def wait_log(self, text: str, deadline_s: float = 15.0) -> str:
        """Returns the log once it contains the text."""
        wait_for(lambda: text in self.log, deadline_s, f"{text!r} in the log of kvhostd:\n{self.log}")
        return self.log

    def wait_end(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Waits until it has ended; returns the exit code."""
        return self.process.wait(deadline_s)

    def stop(self) -> int:
        """SIGTERM, and waits; returns the exit code."""
        self.process.terminate()
        return self.wait_end()

    def kill(self) -> None:
        """SIGKILL, and waits."""
        self.process.kill()
        self.wait_end()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it if it runs, and removes the folder if it is ours. A second call does nothing."""
        if self.returncode is None:
            self.kill()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _clean_environment() -> dict[str, str]:
    """Ours, without what would configure a daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVHOST_")}


def _channel(socket: str) -> grpc.Channel:
    """A channel that remembers no earlier failure to connect."""
    return grpc.insecure_channel(grpc_target(socket), options=[("grpc.use_local_subchannel_pool", 1)])
