"""Stops an engine from asking a daemon that does not answer (I8).

Three failures in a row, or one sign that nobody is there, open the breaker. From then on one question a
second is let through, and the first answer closes it.
"""

import threading
import time
from collections.abc import Callable

from kvhost_client.errors import BreakerOpen, DeadlineExceeded, NotServing, Unavailable

FAILURES_TO_OPEN = 3
ASK_EVERY_S = 1.0


class Breaker:
    """Thread-safe; never waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open = False
        self._asked_at = 0.0
        self._opened = 0

    @property
    def is_open(self) -> bool:
        """True while the daemon is taken not to answer."""
        return self._open

    @property
    def times_opened(self) -> int:
        """How often it opened, since the start."""
        return self._opened

    def allow(self) -> bool:
        """May the daemon be asked now? While open, True once a second: that caller tries for all."""
        if not self._open:
            return True
        with self._lock:
            now = self._clock()
            if self._open and now - self._asked_at < ASK_EVERY_S:
                return False
            self._asked_at = now
            return True

    def success(self) -> None:
        """The daemon answered, even if only to refuse."""
        if not self._failures and not self._open:
            return
        with self._lock:
            self._failures = 0
            self._open = False

    def failure(self, error: Exception) -> None:
        """A question ended in this error. Only silence and absence count: a daemon that refuses, or that is
        starting or draining, is there."""
        if isinstance(error, BreakerOpen):
            return
        if isinstance(error, NotServing) or not isinstance(error, Unavailable | DeadlineExceeded):
            self.success()
            return
        with self._lock:
            self._failures += 1
            if self._open:
                return
            if isinstance(error, Unavailable) or self._failures >= FAILURES_TO_OPEN:
                self._open = True
                self._opened += 1
                self._asked_at = self._clock()
