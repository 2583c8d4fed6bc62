"""The TCP port: what may be asked from another host, and by whom. Off unless asked for, never without TLS.

Both sides show certificates. Served are Admin, health, reflection, and of Cache only what holds nothing:
Watch, and Lookup without a session. Memory, sessions and tickets never leave the host.
"""

import logging
import socket
import ssl
import stat
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvhost_proto.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc
from kvhost_server.admin import AdminService
from kvhost_server.decoding import TypedDecoding
from kvhost_server.errors import Code, Refused
from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.listener import Address, Listener
from kvhost_server.measures import Measures
from kvhost_server.service import CacheService
from kvhost_server.wire import refuse

log = logging.getLogger(__name__)


def remote_server(
    listener: Listener,
    admin: AdminService,
    cache: CacheService,
    healths: health.aio.HealthServicer,
    options: Sequence[tuple[str, int]],
    *,
    measures: Measures,
) -> grpc.aio.Server:
    """A server on the TCP port, not started.

    Raises:
        StartupError: a file is not what it should be, or nobody may listen there.
    """
    server = grpc.aio.server(interceptors=[TypedDecoding(measures)], options=options)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    cache_pb2_grpc.add_CacheServicer_to_server(RemoteCache(cache), server)
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    names = (
        admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
        cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name,
        health.SERVICE_NAME,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    where = _listen(server, listener.address, credentials_of(listener))
    log.info("other hosts are served on %s, whoever shows a certificate of %s", where, listener.client_ca)
    return server


def credentials_of(listener: Listener) -> grpc.ServerCredentials:
    """What gRPC needs; checked here, because gRPC would only say that it cannot bind.

    Raises:
        StartupError: a file cannot be read, or is not what it should be.
    """
    cert, key = _read("--tls-cert", listener.cert), _read("--tls-key", listener.key)
    client_ca = _read("--tls-client-ca", listener.client_ca)
    mode = stat.S_IMODE(listener.key.stat().st_mode)
    if mode & 0o077:
        log.warning("--tls-key %s is open to other users (mode %04o); chmod 0600 it", listener.key, mode)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(listener.cert, listener.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(
            f"--tls-cert {listener.cert} and --tls-key {listener.key} do not serve ({_reason(error)}); give "
            "a PEM certificate and its own unencrypted PEM key",
            ExitCode.CONFIG,
        ) from error
    try:
        context.load_verify_locations(listener.client_ca)
    except ssl.SSLError as error:
        raise StartupError(
            f"--tls-client-ca {listener.client_ca} holds no certificate ({_reason(error)}); give the PEM "
            "certificates of the authorities whose clients may connect",
            ExitCode.CONFIG,
        ) from error
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=True)


def _listen(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials) -> Address:
    """Adds the port to a server that has not started; returns where it is.

    Raises:
        StartupError: nobody may listen there.
    """
    try:
        _try_to_bind(address)
        port = server.add_secure_port(str(address), credentials)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(
            f"--tcp {address} cannot be listened on: {reason}; choose another address or port",
            ExitCode.UNAVAILABLE,
        ) from error
    return Address(address.host, port)


def _try_to_bind(address: Address) -> None:
    """gRPC gives no reason when it cannot bind; the kernel does."""
    for family, kind, protocol, _, where in socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)


class RemoteCache(cache_pb2_grpc.CacheServicer):
    """kvhost.v1.Cache as seen over TCP: what is stored, and nothing that belongs to a session.

    Args:
        local: answers.
    """

    def __init__(self, local: CacheService) -> None:
        self._local = local

    async def Lookup(self, request: cache_pb2.LookupRequest, context: Any) -> cache_pb2.LookupReply:
        if request.session_id or request.pin:
            await self._only_here(request, context)
        if not request.namespace:
            await refuse(
                context,
                Refused(
                    Code.INVALID_ARGUMENT, "a lookup over TCP has no session; name the namespace to look in"
                ),
            )
        reply: cache_pb2.LookupReply = await self._local.Lookup(request, context)
        return reply

    async def Watch(
        self, request: cache_pb2.WatchRequest, context: Any
    ) -> AsyncGenerator[cache_pb2.WatchEvent, None]:
        async with aclosing(self._local.Watch(request, context)) as events:
            async for event in events:
                yield event

    async def _only_here(self, request: object, context: Any) -> Any:
        await refuse(
            context,
            Refused(
                Code.PERMISSION_DENIED,
                "sessions and pins are for engines of the daemon's own host, over its Unix sockets; over TCP "
                "there are Admin, health, Watch, and Lookup with a namespace and without pin",
            ),
        )

    Ping = OpenSession = DeclareNamespace = Reserve = Update = Exchange = Reset = _only_here


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(
            f"{option} {path} cannot be read: {error.strerror}; name a PEM file that the daemon may read",
            ExitCode.CONFIG,
        ) from error


def _no_password() -> str:
    """Asked for an encrypted key: without this, OpenSSL would ask the terminal."""
    return ""


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
