"""What passes between the engine's thread and the agent's: questions, a step's changes, news, counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvhost_client.types import Abort, ChainQuery, StoreOf
from kvhost_connector.holds import Authority, Owner, PinnedSlot
from kvhost_connector.session import Session


class TicketState(Enum):
    WAITING = auto()
    ANSWERED = auto()
    FAILED = auto()
    DROPPED = auto()


@dataclass
class Ticket:
    """A question of one request on its way. Keys are as on the wire.

    `found` holds a `Found` value for each key that was answered; with `pin`, the hits are held under
    `authority`, and whoever drops the ticket gives them back. With `hold` a lookup's hits are pinned, too,
    before it is answered.
    """

    chains: tuple[ChainQuery, ...]
    pin: bool
    serial: int
    asked_at: float
    hold: bool = False
    state: TicketState = TicketState.WAITING
    found: dict[bytes, int] = field(default_factory=dict)
    pins: dict[bytes, PinnedSlot] = field(default_factory=dict)
    authority: Authority | None = None
    # vLLM's id of the request, for people.
    request: str = ""


Answered = tuple[Ticket, dict[bytes, int], dict[bytes, PinnedSlot]]
"""What was found for a ticket, and what is held, by key."""


class NewsKind(Enum):
    STORED = auto()
    REMOVED = auto()
    # Nothing is known to be stored any more: another daemon, other weights, or lost notices.
    FORGET = auto()
    # What is on its way from or to the pool must not take effect: the daemon declared its content invalid.
    STALE = auto()


class News(NamedTuple):
    """Something about stored keys that the manager has not heard."""

    kind: NewsKind
    keys: tuple[bytes, ...] = ()


@dataclass
class Changes:
    """What the engine's steps changed, of what one session holds."""

    owner: Owner
    assigns: list[StoreOf] = field(default_factory=list)
    commits: list[StoreOf] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    touches: list[ChainQuery] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.assigns or self.commits or self.aborts or self.releases or self.touches)

    @property
    def urgent(self) -> bool:
        """Whether somebody may wait for these: all but assigns, which can go with what follows."""
        return bool(self.commits or self.aborts or self.releases or self.touches)

    def followed_by(self, later: Changes) -> Changes:
        """Both as one, in order."""
        return Changes(
            self.owner,
            self.assigns + later.assigns,
            self.commits + later.commits,
            self.aborts + later.aborts,
            self.releases + later.releases,
            self.touches + later.touches,
        )


@dataclass(frozen=True)
class Round:
    """What the agent does before it looks at the board again."""

    session: Session
    serial: int
    changes: Changes
    declare: bool
    rebase: str | None
    lookups: list[Ticket]
    pins: list[Ticket]
    reserve: int
    # Ask only whether the daemon is back.
    probe: bool = False


class Counters:
    """What happened that a person may want to know. Each starts at 0; any thread may add."""

    NAMES = (
        "lookups",
        "lookup_deadlines",
        "pin_deadlines",
        "late_pins_given_back",
        "grants_given_back",
        "stores_without_grant",
        "failed_loads",
        "failed_stores",
        "refused_updates",
        "failed_calls",
        "attached",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(self.NAMES, 0)
        self.any = False
        """Whether anything was counted since `take`."""

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._values[name] += count
            self.any = True

    def take(self) -> dict[str, int]:
        """Counts since the last call; those that are 0 are left out."""
        with self._lock:
            self.any = False
            taken = {name: count for name, count in self._values.items() if count}
            self._values = dict.fromkeys(self.NAMES, 0)
        return taken
