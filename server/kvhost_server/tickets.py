"""Proof that a process has ended, and the one-time tickets that carry a scheduler's identity to gRPC.

gRPC shows a handler nothing about its peer, so identity is taken on the handover socket and travels as a
secret. Owns the pidfds of schedulers; a `PidWatch` is the one owner of its pidfd.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable

from kvhost_server.identity import Identity

TICKET_BYTES = 32
VALID_S = 30
_MOST_WAITING = 1024


class PidWatch:
    """Calls `on_end` once when a process has ended (its pidfd became readable), unless closed before (I4)."""

    def __init__(self, pidfd: int, on_end: Callable[[], None]) -> None:
        self.on_end = on_end
        self._pidfd: int | None = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended)

    def close(self) -> None:
        """Stops watching and closes the pidfd. A second call does nothing."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _ended(self) -> None:
        self.close()
        self.on_end()


class Tickets:
    """Tickets that were given out, and the schedulers that came with one.

    A ticket is good once, for `VALID_S` seconds, while its process lives. Only its hash is kept, and
    compared in constant time. When too many wait, the oldest is dropped, of the same user if there is one.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, Identity] = {}
        self._watches: dict[bytes, PidWatch] = {}
        # Redeemed, and nobody has asked yet to hear of the end: by pidfd.
        self._unclaimed: dict[int, PidWatch] = {}

    @property
    def waiting(self) -> int:
        """Tickets that may still be redeemed."""
        return len(self._waiting)

    def issue(self, identity: Identity) -> bytes:
        """A new ticket for this process. Takes over its pidfd."""
        if len(self._waiting) >= _MOST_WAITING:
            own = (digest for digest, other in self._waiting.items() if other.uid == identity.uid)
            self._drop(next(own, next(iter(self._waiting))))
        ticket = secrets.token_bytes(TICKET_BYTES)
        digest = hashlib.sha256(ticket).digest()
        self._waiting[digest] = identity
        if identity.pidfd is not None:
            self._watches[digest] = PidWatch(identity.pidfd, lambda: self._drop(digest))
        asyncio.get_running_loop().call_later(VALID_S, self._drop, digest)
        return ticket

    def redeem(self, ticket: bytes) -> Identity | None:
        """Who received this ticket; None when it is unknown, used or expired, or its process has ended.

        Call `watch_end` with what it returns; a pidfd that nobody watches is closed after `VALID_S` seconds.
        """
        digest = hashlib.sha256(ticket).digest()
        known = next((known for known in self._waiting if hmac.compare_digest(known, digest)), None)
        if known is None:
            return None
        identity = self._waiting.pop(known)
        watch = self._watches.pop(known, None)
        if watch is not None and identity.pidfd is not None:
            pidfd = identity.pidfd
            self._unclaimed[pidfd] = watch
            watch.on_end = lambda: self._give_up(pidfd, watch)
            asyncio.get_running_loop().call_later(VALID_S, self._give_up, pidfd, watch)
        return identity

    def watch_end(self, identity: Identity, on_end: Callable[[], None]) -> Callable[[], None]:
        """Calls `on_end` once when that process has ended; returns how to stop watching.

        Where no pidfd could be had nothing is watched: the end of the session's stream has to do.
        """
        if identity.pidfd is None:
            return lambda: None
        watch = self._unclaimed.pop(identity.pidfd, None)
        if watch is None:  # it ended between redeeming and now
            asyncio.get_running_loop().call_soon(on_end)
            return lambda: None
        watch.on_end = on_end
        return watch.close

    def close(self) -> None:
        """Forgets all tickets and closes their pidfds. Watches that were claimed belong to the sessions."""
        for digest in list(self._waiting):
            self._drop(digest)
        for pidfd, watch in list(self._unclaimed.items()):
            self._give_up(pidfd, watch)

    def _drop(self, digest: bytes) -> None:
        self._waiting.pop(digest, None)
        watch = self._watches.pop(digest, None)
        if watch is not None:
            watch.close()

    def _give_up(self, pidfd: int, watch: PidWatch) -> None:
        """Closes a redeemed ticket's watch, unless somebody claimed it. (The number may be another's by
        now.)"""
        if self._unclaimed.get(pidfd) is watch:
            del self._unclaimed[pidfd]
            watch.close()
