"""Slots granted ahead: how many to hold, when to ask for more, when to give them back (design section 7, I5).

The agent's thread fills the supply, the engine's thread takes from it; neither waits for the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvhost_client.types import Grant

IDLE_GIVES_BACK_S = 5.0
"""Without a step for so long, unused grants go back to the daemon."""

# Before more is asked for after fewer slots were given than asked for.
PENDING_PAUSE_S = 0.02
FULL_PAUSE_S = 0.25
RECALL_PAUSE_S = 0.05


class Supply:
    """Grants of one authority, which `serial` names."""

    def __init__(self, target: int, clock: Callable[[], float]) -> None:
        """`target`: slots to hold while the engine works; the daemon gives fewer where the pool is small."""
        self._target = target
        self._clock = clock
        self._lock = threading.Lock()
        self._serial = 0
        self._grants: deque[Grant] = deque()
        self._ask_after = self._recalled_until = 0.0
        self._recalled = 0
        self._active_at = float("-inf")
        self._room = True

    def __len__(self) -> int:
        return len(self._grants)

    # For the engine's thread.

    def take(self, serial: int, count: int) -> list[Grant]:
        """Up to `count` grants, oldest first; none for another authority."""
        with self._lock:
            if serial != self._serial:
                return []
            return [self._grants.popleft() for _ in range(min(count, len(self._grants)))]

    def engine_active(self) -> None:
        """The engine works: grants are worth holding."""
        self._active_at = self._clock()

    @property
    def has_hope(self) -> bool:
        """Whether a store that found no grant may find one soon."""
        return self._room

    # For the board.

    def renew(self, serial: int) -> list[Grant]:
        """From now on grants of this authority; returns what was left of the old one."""
        with self._lock:
            left, self._grants = list(self._grants), deque()
            self._serial = serial
        self.freed()
        return left

    def put(self, serial: int, grants: Iterable[Grant]) -> bool:
        """False (and nothing is kept) when the authority is another one by now."""
        with self._lock:
            if serial != self._serial:
                return False
            self._grants.extend(grants)
            return True

    def freed(self) -> None:
        """Room may have become free."""
        self._room, self._ask_after = True, 0.0

    def fell_short(self, given: int, *, pending: bool) -> None:
        """Fewer were given than asked for; with `pending` more are on their way."""
        self._ask_after = self._clock() + (PENDING_PAUSE_S if pending else FULL_PAUSE_S)
        self._room = given > 0 or pending

    def failed(self) -> None:
        """The question for more was not answered."""
        self._ask_after = self._clock() + FULL_PAUSE_S

    def recall(self, count: int) -> None:
        """Somebody else needs so many slots."""
        self._recalled += count

    def missing(self) -> int:
        """How many slots to ask for now; 0 while enough are held, or it is too early to ask again.

        The target is what two steps may need: as long as more than half is there, the next step has enough.
        """
        wanted, held = self._wanted(), len(self._grants)
        early = self._clock() < max(self._ask_after, self._recalled_until)
        return 0 if early or 2 * held > wanted else wanted - held

    def surplus(self) -> list[Grant]:
        """Grants to give back: what was recalled, newest first, and everything when the engine is idle."""
        count = self._recalled if self._wanted() else len(self._grants)
        self._recalled = 0
        if not count:
            return []
        # Whoever recalled them needs the room now.
        self._recalled_until = self._clock() + RECALL_PAUSE_S
        with self._lock:
            return [self._grants.pop() for _ in range(min(count, len(self._grants)))]

    def close(self) -> None:
        """Nothing is held from now on."""
        self._active_at = float("-inf")
        self._target = 0

    def due(self) -> list[float]:
        """Times at which there is something to do without an order."""
        now, due = self._clock(), []
        if self._grants:
            due.append(self._active_at + IDLE_GIVES_BACK_S)
        again = max(self._ask_after, self._recalled_until)
        if self._wanted() and again > now:
            due.append(again)
        return due

    def _wanted(self) -> int:
        return self._target if self._clock() - self._active_at <= IDLE_GIVES_BACK_S else 0
