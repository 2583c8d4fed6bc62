"""The last few hundred requests whose engines named them: which keys they asked for, and what was there.

So that a person can ask for a request by the name it has in the engine's log. Bounded in number and in bytes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvhost_server.errors import Code, Refused
from kvhost_server.ids import NamespaceNumber, SessionNumber
from kvhost_server.lookups import Answered, QueryAsked
from kvhost_server.wire import printable

MOST_REQUESTS = 512
MOST_BYTES = 8 << 20
LONGEST_NAME = 128
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class AskedChain:
    """Keys of one group, back to back, and what was answered: one byte (`Found`) a key, perhaps fewer."""

    group: int
    semantics: int
    keys: bytes
    found: bytes


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """One request as its engine looked it up; `at` on the clock of the books, in seconds."""

    name: str
    session: SessionNumber
    namespace: NamespaceNumber
    at: float
    chains: tuple[AskedChain, ...]

    @property
    def bytes(self) -> int:
        return sum(len(chain.keys) + len(chain.found) for chain in self.chains) + len(self.name)


class Requests:
    """What was asked lately, the oldest first."""

    def __init__(self, most: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, AskedRequest] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """What is kept, without Python's own."""
        return self._bytes

    def remember(
        self,
        session: SessionNumber,
        namespace: NamespaceNumber,
        now: float,
        queries: Sequence[QueryAsked],
        answered: Answered,
    ) -> None:
        """Keeps those queries that name a request; the latest of a name replaces the one before."""
        for query, answers in zip(queries, answered, strict=True):
            if not query.request:
                continue
            chains = tuple(
                AskedChain(chain.group, chain.semantics, chain.keys, found.found)
                for chain, found in zip(query.chains, answers, strict=True)
            )
            asked = AskedRequest(printable(query.request, LONGEST_NAME), session, namespace, now, chains)
            self._drop(asked.name)
            self._kept[asked.name] = asked
            self._bytes += asked.bytes
            while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
                self._drop(next(iter(self._kept)))

    def named(self, name: str) -> AskedRequest:
        """The request of this name, or the only one whose name contains it.

        Raises:
            Refused: none, or more than one.
        """
        if name in self._kept:
            return self._kept[name]
        like = [known for known in self._kept if name and name in known]
        if len(like) == 1:
            return self._kept[like[0]]
        known = ", ".join(list(like or self._kept)[: -_SHOWN - 1 : -1]) or "none"
        if like:
            raise Refused(
                Code.NOT_FOUND, f"{len(like)} requests have {name[:LONGEST_NAME]!r} in their name: {known}"
            )
        raise Refused(
            Code.NOT_FOUND,
            f"no request {name[:LONGEST_NAME]!r} among the last {len(self._kept)} that engines named; "
            f"the latest are: {known}",
        )

    def _drop(self, name: str) -> None:
        gone = self._kept.pop(name, None)
        if gone is not None:
            self._bytes -= gone.bytes
