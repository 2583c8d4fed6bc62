"""Keeps the scheduler's session open, from a thread of its own.

Opens it, declares the namespace, notices its end, opens the next one after the daemon's return, and asks a
silent daemon once a second whether it answers again. Whoever uses a `Link` never waits on it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping

from kvhost_client.breaker import ASK_EVERY_S, Breaker
from kvhost_client.errors import BreakerOpen, DeadlineExceeded, KVHostError, SessionEnded, Unavailable
from kvhost_client.handover import check_instance_id
from kvhost_client.paths import beside
from kvhost_client.session import Session
from kvhost_client.types import Declared
from kvhost_proto.v1 import cache_pb2, common_pb2

logger = logging.getLogger(__name__)

Declaration = tuple[common_pb2.NamespaceSpec, Mapping[int, bytes]]

# Between two tries to open. A daemon that is absent may be back any moment; one that refuses us goes on so.
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 0.5
REFUSED_PAUSE_S = 2.0
# How often to look whether a silent daemon may be asked again.
_WATCH_S = 0.1


class Link:
    """A session with whichever daemon runs at the socket, for as long as the engine lives.

    All callbacks come from the link's one thread, in order: `on_up(session, declared)`, that session's
    notices, `on_down(reason)`. They must not wait for anything, and may call the session.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str],
        instance_id: bytes,
        label: str,
        *,
        declare: Callable[[], Declaration | None],
        on_up: Callable[[Session, Declared], None],
        on_down: Callable[[str], None],
        on_notice: Callable[[cache_pb2.Notice], None],
        deadline_s: float = 1.0,
    ) -> None:
        """Opens nothing yet.

        `declare` gives what to declare, the namespace and each rank's token, or None while that is not known;
        it is asked before every opening, from the link's thread. After a reset it must give the namespace
        with the new weights (I12). `deadline_s` is for opening and, unless a call names its own, for each
        call of the session.
        """
        check_instance_id(instance_id)
        beside(socket)
        self._socket = socket
        self._instance_id = instance_id
        self._label = label
        self._declare = declare
        self._on_up = on_up
        self._on_down = on_down
        self._on_notice = on_notice
        self._deadline_s = deadline_s
        self.breaker = Breaker()
        """Shared by all sessions of this link; open means that calls raise `BreakerOpen` at once."""
        self._session: Session | None = None
        self._problem = ""
        self._notices: deque[cache_pb2.Notice] = deque()
        self._wake = threading.Event()
        self._again = False
        self._closing = False
        self._pid: int | None = None
        self._thread: threading.Thread | None = None

    @property
    def session(self) -> Session | None:
        """The open session, once its namespace is declared. None: the engine computes."""
        session = self._session
        return None if session is None or session.ended else session

    @property
    def problem(self) -> str:
        """Why there is no session, in one line; empty when nothing is known to be wrong."""
        return self._problem

    def start(self) -> None:
        """Starts the thread. Call it where no fork follows any more."""
        if self._thread is not None:
            raise RuntimeError("this Link was started before; make a new one")
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvhost-link", daemon=True)
        self._thread.start()

    def declare_again(self) -> None:
        """What `declare` gives has changed, or is known only now: declare it. Never waits."""
        self._again = True
        self._wake.set()

    def close(self, timeout: float = 5.0) -> bool:
        """Ends the session and the thread. False if that took longer than `timeout` seconds."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return True
        self._closing = True
        self._wake.set()
        thread.join(timeout)
        return not thread.is_alive()

    # The link's thread.

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing:
            self._again = False
            declaration = self._declaration()
            try:
                session = None if declaration is None else self._open(declaration)
                limit = LAST_PAUSE_S
            except KVHostError as error:
                session = None
                self._note(str(error))
                absent = isinstance(error, Unavailable | DeadlineExceeded | SessionEnded)
                limit = LAST_PAUSE_S if absent else REFUSED_PAUSE_S
            if session is not None:
                self._serve(session)
                pause = FIRST_PAUSE_S
            else:
                self._wake.clear()  # the end of a session that was given up rang it
                if not (self._again or self._closing):
                    self._wake.wait(pause)
                    pause = min(2 * pause, limit)
            self._wake.clear()

    def _open(self, declaration: Declaration) -> Session:
        """Opens a session and declares its namespace; an error leaves none behind."""
        notices: deque[cache_pb2.Notice] = deque()

        def hear(notice: cache_pb2.Notice) -> None:  # on the session's thread
            notices.append(notice)
            self._wake.set()

        self._notices = notices
        session = Session.open(
            self._socket,
            instance_id=self._instance_id,
            label=self._label,
            deadline_s=self._deadline_s,
            on_notice=hear,
            on_end=lambda reason: self._wake.set(),
            breaker=self.breaker,
        )
        try:
            declared = session.declare(*declaration)
        except BaseException:
            session.close()
            raise
        self._problem = ""
        self._session = session
        logger.info("session %d with kvhostd, boot %016x, is open", session.number, session.boot_id)
        self._tell(lambda: self._on_up(session, declared))
        return session

    def _serve(self, session: Session) -> None:
        """Until the session's end."""
        while not (self._closing or session.ended):
            self._deliver()
            if self._again:
                self._redeclare(session)
            if self.breaker.is_open:
                self._ask_whether_back(session)
            self._wake.wait(_WATCH_S if self.breaker.is_open or self._again else ASK_EVERY_S)
            self._wake.clear()
        reason = "the link was closed" if self._closing else session.end_reason
        self._session = None
        session.close()
        self._deliver()
        if not self._closing:
            self._note(reason)
        self._tell(lambda: self._on_down(reason))

    def _redeclare(self, session: Session) -> None:
        self._again = False
        declaration = self._declaration()
        if declaration is None:
            return
        try:
            session.declare(*declaration)
        except SessionEnded:
            return
        except (Unavailable, DeadlineExceeded) as error:
            self._again = True
            self._note(str(error))
        except KVHostError as error:
            self._note(str(error))

    def _ask_whether_back(self, session: Session) -> None:
        """The answer, or its absence, is what the breaker learns from."""
        try:
            session.ping()
        except BreakerOpen:
            return  # asked less than a second ago
        except KVHostError as error:
            self._note(str(error))
        else:
            self._problem = ""

    def _deliver(self) -> None:
        while self._notices:
            notice = self._notices.popleft()
            self._tell(lambda notice=notice: self._on_notice(notice))  # type: ignore[misc]

    def _declaration(self) -> Declaration | None:
        try:
            return self._declare()
        except Exception:
            logger.exception("the link's declare callback failed")
            return None

    def _tell(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            logger.exception("a callback of the link failed")

    def _note(self, problem: str) -> None:
        """Remembers a problem; logs it when it is another than before: retries must not flood the log."""
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s; the engine computes without the cache meanwhile", problem)
