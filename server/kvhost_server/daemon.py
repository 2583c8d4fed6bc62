"""The daemon: builds the parts, serves until told to stop, and takes everything down again.

`Config` -> `Daemon` -> parts. What the manager orders goes through `Orders` to the part that carries it out.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc
from kvhost_server import log as logs
from kvhost_server.admin import AdminService, Shown
from kvhost_server.books import ServiceState
from kvhost_server.config import Config
from kvhost_server.decoding import TypedDecoding
from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.handover import MOST_CONNECTIONS, HandoverServer
from kvhost_server.identity import AllowList
from kvhost_server.ids import MappingId, NamespaceNumber, SegmentId, SessionNumber, StoreId
from kvhost_server.lag import LoopLag
from kvhost_server.manager import Manager
from kvhost_server.measures import Measures
from kvhost_server.metrics import Sources
from kvhost_server.notices import Assignment, Notice
from kvhost_server.notify import ServiceManager
from kvhost_server.observation import Observation
from kvhost_server.pool import Pool
from kvhost_server.recall import Requests
from kvhost_server.room import Surveyor
from kvhost_server.service import CacheService
from kvhost_server.sizing import plan_pool
from kvhost_server.sockets import SocketFile, SocketLock
from kvhost_server.tcp import remote_server
from kvhost_server.units import format_size

GRACE_S = 1.0
"""How long calls in flight may take to finish when the daemon stops."""
_LARGEST_MESSAGE = 16 << 20
_FDS_FOR_OTHERS = 512
_TEND_EVERY_S = 1.0
_FEWEST_CONNECTIONS = 32
_CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE),
    # Any client's keepalive is welcome: with the defaults a ping a second ends a long call (F12).
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # Engines ask over Unix sockets: there is no bandwidth to probe for, and a question of 8192 keys should
    # not wait for windows to open.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    # A connection on which nobody speaks is a descriptor less for everybody; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 5000),
)

log = logging.getLogger(__name__)


class Orders:
    """The manager's outbox: hands each order to the part that carries it out. Set them once they exist."""

    handover: HandoverServer
    service: CacheService
    pool: Pool
    manager: Manager

    def offer(self, mapping: MappingId, segments: Sequence[Assignment]) -> None:
        self.handover.offer(mapping, segments)

    def retire(self, mapping: MappingId, segment_ids: Sequence[SegmentId]) -> None:
        self.handover.retire(mapping, segment_ids)

    def fence(
        self, mapping: MappingId, fence: int, session_below: SessionNumber, store_ids: Sequence[StoreId]
    ) -> None:
        self.handover.fence(mapping, fence, session_below, store_ids)

    def notice(self, session: SessionNumber, notice: Notice) -> None:
        self.service.notice(session, notice)

    def clean(self, pool_index: int) -> None:
        self.pool.clean(pool_index, self.manager.segment_clean)

    def resize(self, asked_bytes: int, fresh: Sequence[int]) -> None:
        self.pool.resize(asked_bytes, fresh, self.manager.segment_ready, self.manager.segments_missing)

    def release(self, pool_index: int) -> None:
        self.pool.release(pool_index)

    def events(self, namespace: NamespaceNumber) -> None:
        self.service.events(namespace)

    def chores(self) -> None:
        self.service.chores()


class Daemon:
    """One daemon process. `run` once.

    Args:
        config: what it was told.
        read_again: what it would be told now; raises `StartupError` where that is wrong.
    """

    def __init__(self, config: Config, read_again: Callable[[], Config] | None = None) -> None:
        self._config = config
        self._read_again = read_again
        self._ends = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reason = "told to stop"
        self._failure: StartupError | None = None
        self._health = health.aio.HealthServicer()
        self._lag = LoopLag()
        self._measures = Measures()
        self._service_manager = ServiceManager.from_environment()

    async def run(self) -> None:
        """Serves until a signal comes.

        Raises:
            StartupError: it could not start, or cannot go on.
        """
        async with self._ends:
            await self._startup()
            await self._stop.wait()
            await self._shutdown()
        if self._failure is not None:
            raise self._failure

    async def _startup(self) -> None:
        """Opens the sockets at once (the pool is populated behind them) and leaves the undoing to `_ends`."""
        began = time.monotonic()
        config = self._config
        self._ends.callback(self._service_manager.close)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        cache_file = SocketFile(config.socket, config.socket_mode, config.socket_group)
        admin_file = SocketFile(config.admin_socket, config.socket_mode, config.admin_group)
        handover_file = SocketFile(config.handover_socket, config.socket_mode, config.socket_group)
        files = (cache_file, admin_file, handover_file)
        self._claim(files)
        self._build_parts()
        servers = [
            (self._server(_CACHE, self._service, cache_pb2_grpc.add_CacheServicer_to_server), cache_file),
            (self._server(_ADMIN, self._admin, admin_pb2_grpc.add_AdminServicer_to_server), admin_file),
        ]
        for file in files:
            self._ends.callback(file.remove)
        self._servers = [server for server, _ in servers]
        if config.tcp is not None:
            remote = remote_server(
                config.tcp,
                self._admin,
                self._service,
                self._health,
                _SERVER_OPTIONS,
                measures=self._measures,
            )
            self._servers.append(remote)
        for server, file in servers:
            file.bind(partial(server.add_insecure_port, file.grpc_target))
        handover_file.bind(partial(self._handover.listen, config.handover_socket))
        self._ends.callback(self._handover.close)
        for server in self._servers:
            await server.start()
        self._handover.start()
        await self._observation.open()
        self._ends.push_async_callback(self._observation.close)
        await self._tell_health(ServiceState.STARTING)
        self._spawn(self._populate())
        self._spawn(self._lag.watch())
        self._spawn(self._observation.watch())
        self._spawn(self._service_manager.report_life())
        gc.collect()
        gc.freeze()  # what lives now lives as long as the daemon: no collection need look at it again
        log.info(
            "kvhostd pid %d listens on %s (%.0f ms); populating %s in %d segments of %s",
            os.getpid(),
            config.socket,
            (time.monotonic() - began) * 1e3,
            format_size(self._pool.capacity_bytes),
            self._pool.segments,
            format_size(self._pool.segment_bytes),
        )

    def _claim(self, files: Sequence[SocketFile]) -> None:
        """Makes sure that we alone serve here."""
        # People and engines may be of different groups and still share the folder of the sockets.
        two_groups = self._config.admin_group not in (None, self._config.socket_group)
        for file in files:
            file.prepare(passable=two_groups)
        self._ends.callback(SocketLock(self._config.socket).release)
        for file in files:
            file.clear()

    def _build_parts(self) -> None:
        config = self._config
        plan = plan_pool(config.memory, config.segment_size, config.hugepages, Surveyor(config.cgroup_root))
        connections = _connections_for(plan.segments)
        orders = Orders()
        requests = Requests()
        boot_id = secrets.randbits(64) | 1
        self._pool = orders.pool = Pool(
            plan,
            config.lock,
            wait_s=config.memory_wait,
            strict=config.strict_memory,
            cgroup_root=config.cgroup_root,
        )
        self._ends.push_async_callback(self._pool.close)
        self._ends.push_async_callback(self._end_tasks)
        self._manager = orders.manager = Manager(
            boot_id, plan.segment_bytes, plan.segments, orders, time.monotonic, policy=config.policy
        )
        allow = self._allow_list()
        if os.geteuid() == allow.overflow_uid:
            log.warning(
                "kvhostd runs as uid %d, the kernel's overflow uid, which names nobody: engines of that user "
                "are refused; run it as a user of its own",
                allow.overflow_uid,
            )
        self._handover = orders.handover = HandoverServer(
            boot_id, self._manager, self._pool.fd, allow, most_connections=connections
        )
        self._service = orders.service = CacheService(
            self._manager, self._handover, lambda: self._pool.populated, self._measures, requests
        )
        self._observation = Observation(lambda: self._config, self._sources)
        self._admin = AdminService(
            self._manager,
            self._pool,
            Shown(
                lambda: self._config.shown(),  # noqa: PLW0108 - another one after a reload
                lambda: self._config.sources,
                lambda: self._observation.url,
            ),
            requests=requests,
            extra_anomalies=lambda: {
                **self._shell_anomalies(),
                "loop_lag_max_us": int(self._lag.largest_s * 1e6),
            },
            set_state=self._set_state,
        )

    def _allow_list(self) -> AllowList:
        config = self._config
        group = [] if config.socket_group is None else [config.socket_group]
        return AllowList.of(config.allow_uid, [*config.allow_gid, *group])

    def _reload(self) -> None:
        """SIGHUP: takes from the configuration what can be taken while engines work, and says the rest."""
        if self._read_again is None:
            return
        try:
            fresh = self._read_again()
        except StartupError as error:
            log.error("SIGHUP: the configuration stays as it was: %s", error)
            return
        self._config, changes = self._config.reloaded(fresh)
        for change in changes:
            if change.taken:
                log.warning("SIGHUP: %s is %s now; it was %s", change.name, change.after, change.before)
            else:
                log.warning(
                    "SIGHUP: %s = %s needs a restart; it stays %s", change.name, change.after, change.before
                )
        if not changes:
            log.info("SIGHUP: nothing changed in the configuration")
        self._handover.allow(self._allow_list())
        logs.setup(self._config.log_level, self._config.log_format)

    def _sources(self, observation: Observation) -> Sources:
        """Where metrics and the web page read."""
        return Sources(
            self._manager.books,
            self._pool,
            self._measures,
            self._lag,
            lambda: {**self._shell_anomalies(), **observation.anomalies},
            self._config.lock,
        )

    def _shell_anomalies(self) -> dict[str, int]:
        return {**self._handover.anomalies, "loop_late": self._lag.late}

    def _server(
        self, name: str, servicer: Any, add: Callable[[Any, grpc.aio.Server], None]
    ) -> grpc.aio.Server:
        """A server with this service and the standard ones, so that grpcurl works out of the box."""
        server = grpc.aio.server(interceptors=[TypedDecoding(self._measures)], options=_SERVER_OPTIONS)
        add(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        channelz.add_channelz_servicer(server)
        names = (name, health.SERVICE_NAME, channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        return server

    async def _shutdown(self) -> None:
        """Tells everybody, and lets calls in flight finish, unless a second signal says to hurry."""
        if self._failure is None:
            log.info("going down: %s", self._reason)
        self._service_manager.stopping(f"going down: {self._reason}")
        self._set_state(ServiceState.DRAINING)
        self._service.going_down(self._reason)
        graceful = asyncio.gather(*(server.stop(GRACE_S) for server in self._servers))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((graceful, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not graceful.done():
            await asyncio.gather(*(server.stop(None) for server in self._servers))
        await graceful

    # While it serves.

    async def _populate(self) -> None:
        began = time.monotonic()
        reports = asyncio.ensure_future(self._report_start())
        try:
            await self._pool.populate(self._manager.segment_ready)
        finally:
            reports.cancel()
        self._manager.pool_ends_at(self._pool.segments)
        if self._stop.is_set():
            return
        log.info(
            "serving: %s populated in %.1f s%s",
            format_size(self._pool.capacity_bytes),
            time.monotonic() - began,
            f", {format_size(self._pool.locked_bytes)} locked" if self._pool.locked_bytes else "",
        )
        self._set_state(ServiceState.SERVING)
        self._service_manager.ready(f"serving with a pool of {format_size(self._pool.capacity_bytes)}")
        self._spawn(self._pool.watch_holes(self._manager.hole_detected))
        self._spawn(self._tend())

    async def _report_start(self) -> None:
        """Tells the service manager how far populating is, which may take longer than a start is allowed."""
        pool = self._pool
        await self._service_manager.report_start(
            lambda: pool.populated_bytes,
            lambda: f"populating: {format_size(pool.populated_bytes)} of {format_size(pool.capacity_bytes)}",
            self._config.memory_wait,
        )

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_TEND_EVERY_S)
            self._manager.tend()

    def _set_state(self, state: ServiceState) -> None:
        if self._manager.state is not state:
            log.info("state: %s", state.name.lower())
        self._manager.set_state(state)
        self._service.state_changed()
        self._spawn(self._tell_health(state))

    async def _tell_health(self, state: ServiceState) -> None:
        """`liveness` and Admin answer from the start; the cache is healthy while it serves."""
        up = health_pb2.HealthCheckResponse.SERVING
        cache = up if state is ServiceState.SERVING else health_pb2.HealthCheckResponse.NOT_SERVING
        for name, status in (("liveness", up), (_ADMIN, up), (_CACHE, cache), ("", cache)):
            await self._health.set(name, status)

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._reason = f"got {number.name}"
        self._stop.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A background task that fails ends the daemon: better a restart than half a daemon."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None or self._failure is not None:
            return
        if not isinstance(error, StartupError):
            log.error("a background task failed", exc_info=error)
            error = StartupError(f"ended by an internal error: {error!r}; see the log", ExitCode.FAILED)
        self._failure = error
        self._reason = "the daemon cannot go on"
        self._stop.set()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _connections_for(segments: int) -> int:
    """Raises our limit on open files as far as allowed; returns how many handover connections fit into it.

    Raises:
        StartupError: the pool alone does not fit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    left = MOST_CONNECTIONS * 2 if hard == resource.RLIM_INFINITY else hard - segments - _FDS_FOR_OTHERS
    if left < _FEWEST_CONNECTIONS * 2:
        raise StartupError(
            f"{segments} segments and {_FEWEST_CONNECTIONS} connections need more open files than the "
            f"hard limit of {hard} allows; raise it (LimitNOFILE), or give a larger --segment-size",
            ExitCode.CONFIG,
        )
    return min(MOST_CONNECTIONS, left // 2)


def run(config: Config, read_again: Callable[[], Config] | None = None) -> int:
    """Runs a daemon to its end; returns the exit code. The reason of a failure goes to stderr in one line."""
    logs.setup(config.log_level, config.log_format)
    try:
        asyncio.run(Daemon(config, read_again).run())
    except StartupError as error:
        print(f"kvhostd: {error}", file=sys.stderr)
        return error.code
    return ExitCode.OK
