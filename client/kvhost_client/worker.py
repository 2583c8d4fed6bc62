"""The worker side of an engine: keeps this process attached to whichever daemon runs at the socket.

`WorkerLink` owns the thread, the token and what is still mapped of daemons that are gone; an `Attachment` is
one connection, a `WorkerMapping` what the engine copies through.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable

from kvhost_client import fork
from kvhost_client.attachment import Attachment, Remains, TokenSpent
from kvhost_client.errors import (
    HandoverFailed,
    InvalidArgument,
    KVHostError,
    NotKVHost,
    Refused,
    VersionMismatch,
)
from kvhost_client.handover import HandoverSocket, check_instance_id
from kvhost_client.mapping import Copy, Registrar, WorkerMapping
from kvhost_client.paths import beside
from kvhost_client.prefault import Prefaulter
from kvhost_client.types import Access
from kvhost_client.wake import Wake
from kvhost_proto.v1 import handover_pb2

__all__ = ["Copy", "WorkerLink", "WorkerMapping"]

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32

# Between two tries. A daemon that is absent may be back any moment; one that refuses us will go on refusing.
FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 0.5
REFUSED_PAUSE_S = 2.0
_CONNECT_S = 0.5

# The refusal that means the token, not us: this boot has seen it before.
_ALREADY_EXISTS = 6


class WorkerLink:
    """Attaches a worker process to kvhostd and keeps it attached, from a thread of its own.

    The worker's token goes to the scheduler half through the engine's own channels; when the scheduler has
    named it in its session, the daemon hands the segments over and `mapping` appears. After a restart of the
    daemon the same token is presented to the new one. After a lost connection to a living daemon the token is
    a new one: `on_change` tells, and the scheduler must name it.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str],
        instance_id: bytes,
        rank: int,
        access: Access = Access.CPU,
        on_change: Callable[[], None] | None = None,
        *,
        registrar: Registrar | None = None,
    ) -> None:
        """Opens nothing yet. `socket` is the daemon's first socket; `instance_id` has 16 bytes.

        `registrar` tells a device's driver of the segments.

        `on_change` is called from the link's thread, soon after `token` or `mapping` changed; keep it short.
        """
        check_instance_id(instance_id)
        if rank < 0:
            raise InvalidArgument(f"a worker's rank is 0 or more, found {rank}")
        self._path = beside(socket).handover
        self._instance_id = instance_id
        self._rank = rank
        self._access = access
        self._on_change = on_change
        self._registrar = registrar
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._spent_boot: int | None = None
        self._mapping: WorkerMapping | None = None
        self._problem = ""
        self._remains: list[Remains] = []
        self._prefaulter = Prefaulter(rank)
        self._pid: int | None = None
        self._wake: Wake | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def token(self) -> bytes:
        """32 random bytes for the scheduler to name; empty in a forked child."""
        return self._token if self._ours() else b""

    @property
    def mapping(self) -> WorkerMapping | None:
        """What may be copied through at present; None while no daemon has given segments."""
        mapping = self._mapping
        return None if mapping is None or mapping.gone else mapping

    @property
    def problem(self) -> str:
        """Why there is no mapping, in one line; empty when nothing is known to be wrong."""
        return self._problem

    @property
    def prefaulted_bytes(self) -> int:
        """Bytes of this rank's shards that need no page fault any more."""
        return self._prefaulter.nbytes

    @property
    def prefault_done(self) -> bool:
        """All mapped segments are prefaulted, as far as they can be."""
        return self._prefaulter.idle

    def start(self) -> None:
        """Starts the thread. Call it where no fork follows any more."""
        if self._thread is not None:
            raise RuntimeError("this WorkerLink was started before; make a new one")
        self._pid = os.getpid()
        with fork.guard:
            self._wake = Wake()
            fork.watch(self)
        self._thread = threading.Thread(
            target=self._run, args=(self._wake,), name="kvhost-worker", daemon=True
        )
        self._thread.start()

    def close(self, timeout: float = 5.0) -> bool:
        """Refuses new copies, waits for running ones, unmaps, says BYE, and hangs up.

        False if copies still ran after `timeout` seconds; the rest then follows in the background, and
        nothing is unmapped under them.
        """
        thread = self._thread
        if thread is None or not self._ours():
            return True
        self._closing = True
        assert self._wake is not None
        self._wake.ring()
        thread.join(timeout)
        return not thread.is_alive()

    def abandon(self) -> None:
        """In a forked child: the mapping was not inherited, the parent's connection is not ours."""
        if self._mapping is not None:
            self._mapping.abandon()
        for remains in self._remains:
            remains.mapping.abandon()
        if self._wake is not None:
            self._wake.abandon()

    def _ours(self) -> bool:
        return self._pid is None or self._pid == os.getpid()

    # The link's thread.

    def _run(self, wake: Wake) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing:
            pause = self._attend(wake, pause)
            self._rest(wake, pause)
        while self._remains:
            self._rest(wake, None)
        self._prefaulter.close()
        wake.close()

    def _attend(self, wake: Wake, pause: float) -> float:
        """One connection from beginning to end; the seconds to wait before the next."""
        attachment: Attachment | None = None
        try:
            with HandoverSocket(self._path, _CONNECT_S) as handover:
                attachment = Attachment(
                    handover,
                    wake,
                    self._prefaulter,
                    self._spent_boot,
                    self._publish,
                    registrar=self._registrar,
                )
                attachment.run(self._hello(), self._tend)
            if not self._closing:
                self._note(f"kvhostd at {self._path} hung up")
            return FIRST_PAUSE_S if attachment.served else min(max(2 * pause, FIRST_PAUSE_S), LAST_PAUSE_S)
        except TokenSpent:
            self._renew_token()
            return 0.0
        except KVHostError as error:
            if isinstance(error, Refused) and error.code == _ALREADY_EXISTS:
                self._renew_token()  # what went wrong before, on the connection that used it up, is the news
            else:
                self._note(str(error))
            lasting = isinstance(error, Refused | NotKVHost | VersionMismatch | HandoverFailed)
            return min(max(2 * pause, FIRST_PAUSE_S), REFUSED_PAUSE_S if lasting else LAST_PAUSE_S)
        except OSError as error:
            self._note(f"the connection to kvhostd at {self._path} failed: {error.strerror or error}")
            return REFUSED_PAUSE_S
        except Exception:
            # A fault of our own must cost the cache, not the thread that would unmap and reconnect.
            logger.exception("the connection to kvhostd at %s failed", self._path)
            return REFUSED_PAUSE_S
        finally:
            if attachment is not None:
                self._detach(attachment)

    def _detach(self, attachment: Attachment) -> None:
        if attachment.boot_id is not None:
            self._spent_boot = attachment.boot_id
        remains = attachment.remains()
        if remains is not None and not remains.settle():
            self._remains.append(remains)
        if self._mapping is not None:
            self._mapping = None
            self._tell()

    def _rest(self, wake: Wake, pause: float | None) -> None:
        """Waits (None: for the next ring of the bell), unmapping meanwhile what becomes quiet."""
        until = None if pause is None else time.monotonic() + pause
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        while True:
            self._tend()
            if self._closing and (until is not None or not self._remains):
                return
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            if poll.poll(None if left is None else int(left * 1000) + 1):
                wake.heard()

    def _tend(self) -> bool:
        """Unmaps what has become quiet of earlier daemons. True when the link is being closed."""
        self._remains = [remains for remains in self._remains if not remains.settle()]
        return self._closing

    def _hello(self) -> handover_pb2.Hello:
        return handover_pb2.Hello(
            instance_id=self._instance_id,
            role=handover_pb2.ROLE_WORKER,
            rank=self._rank,
            access=handover_pb2.Access.Name(self._access),
            token=self._token,
        )

    def _publish(self, mapping: WorkerMapping) -> None:
        self._mapping = mapping
        self._problem = ""
        logger.info("attached to kvhostd at %s, boot %016x", self._path, mapping.boot_id)
        self._tell()

    def _renew_token(self) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._spent_boot = None
        self._tell()

    def _note(self, problem: str) -> None:
        """Remembers a problem; logs it when it is another than before: retries must not flood the log."""
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s; the engine computes without the cache meanwhile", problem)

    def _tell(self) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change()
        except Exception:
            logger.exception("on_change of the worker link failed")
