"""A bell for a thread that waits in poll: any thread may ring it."""

import os
import threading


class Wake:
    """Owns one eventfd. Ringing it twice before it is heard wakes once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """For poll; -1 when closed."""
        return self._descriptor

    def ring(self) -> None:
        """Wakes the waiting thread; does nothing after `close`."""
        # Under the lock, so that no number is written to that meanwhile belongs to another file.
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def heard(self) -> None:
        """Called by the woken thread."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Ends the bell. A second call does nothing."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """In a forked child: close our copy. Takes no lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
