"""Workers, fences, quarantine: memory handed out comes back by proof, not by time (I4, I7).

A mapping is one worker process with segments of one namespace. What a session
leaves behind that its workers may still write or read is quarantined until each
of those workers has answered a fence or is proven ended.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from kvhost_server.errors import Code, Refused
from kvhost_server.ids import MappingId, SegmentId, SessionNumber, SlotIndex, StoreId
from kvhost_server.namespace import Namespace
from kvhost_server.notices import Outbox
from kvhost_server.sessions import PeerIdentity, Session

TOKEN_BYTES = 32
_MAX_PARKED = 1024
_MAX_PARKED_OF_ONE_USER = 256
_MAX_SPENT_TOKENS = 8192


class Access(IntEnum):
    """How a worker writes; the values are the wire's."""

    CPU = 1
    DEVICE_DMA = 2


@dataclass(eq=False)
class Mapping:
    """One worker process and the segments it was offered: mapped (True) or not yet (False)."""

    id: MappingId
    rank: int
    access: Access
    token_digest: bytes
    identity: PeerIdentity
    session: SessionNumber | None = None
    connected: bool = True
    segments: dict[SegmentId, bool] = field(default_factory=dict)
    retiring: set[SegmentId] = field(default_factory=set)
    last_fence: int = 0
    open_fences: dict[int, "Quarantine"] = field(default_factory=dict)


@dataclass(eq=False)
class Quarantine:
    """What one session left behind, and the workers whose silence is not yet proven.

    `slots` may still be written; `read` may still be read, so their chunks stay
    but cannot be evicted.
    """

    session: SessionNumber
    label: str
    identity: PeerIdentity
    namespace: Namespace
    slots: list[SlotIndex]
    read: list[SlotIndex]
    waiting: set[MappingId]
    since: float


@dataclass(frozen=True)
class _Claim:
    session: SessionNumber
    rank: int


class Custody:
    """All mappings and all quarantine.

    Args:
        outbox: takes the fences.
        on_release: called with each quarantine whose last worker is proven quiet.
    """

    def __init__(self, outbox: Outbox, on_release: Callable[[Quarantine], None]) -> None:
        self.mappings: dict[MappingId, Mapping] = {}
        # A set that keeps its order. There may be one for every aborted store, hence the sums beside it.
        self.quarantines: dict[Quarantine, None] = {}
        self._slots_of: Counter[bytes] = Counter()
        self._read_of: Counter[bytes] = Counter()
        self._outbox = outbox
        self._on_release = on_release
        self._last_mapping = 0
        self._by_token: dict[bytes, MappingId] = {}
        self._claims: dict[bytes, _Claim] = {}
        self._claimed: dict[_Claim, bytes] = {}
        self._spent: OrderedDict[bytes, None] = OrderedDict()

    # Tokens pair a worker with a session.

    def arrive(self, rank: int, access: Access, token: bytes, identity: PeerIdentity) -> Mapping:
        """A worker said HELLO. It is parked until a session names its token.

        Raises:
            Refused: the token is malformed or was used before, or too many workers are parked.
        """
        if len(token) != TOKEN_BYTES:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"the token has {len(token)} bytes; a token has {TOKEN_BYTES} random bytes",
            )
        digest = _digest(token)
        if digest in self._by_token or digest in self._spent:
            raise Refused(
                Code.ALREADY_EXISTS, "this token was used before; a worker makes a new one each time"
            )
        parked = [m.identity.uid for m in self.mappings.values() if m.session is None and m.connected]
        for count, most, whose in (
            (len(parked), _MAX_PARKED, ""),
            # One user's workers must not bar those of another.
            (parked.count(identity.uid), _MAX_PARKED_OF_ONE_USER, f" of uid {identity.uid}"),
        ):
            if count >= most:
                raise Refused(
                    Code.RESOURCE_EXHAUSTED,
                    f"{most} workers{whose} already wait for their session; is a scheduler missing?",
                )
        self._last_mapping += 1
        mapping = Mapping(MappingId(self._last_mapping), rank, access, digest, identity)
        self.mappings[mapping.id] = mapping
        self._by_token[digest] = mapping.id
        return mapping

    def claim(self, session: Session, rank: int, token: bytes) -> None:
        """The session names a token as its worker of this rank.

        Raises:
            Refused: malformed token, or one that belongs to another engine.
        """
        if len(token) != TOKEN_BYTES:
            raise Refused(
                Code.INVALID_ARGUMENT,
                f"the token of rank {rank} has {len(token)} bytes; a token has {TOKEN_BYTES} random bytes",
            )
        digest = _digest(token)
        mapping = self.mappings.get(self._by_token.get(digest, MappingId(0)))
        if mapping is not None and mapping.identity.instance_id != session.identity.instance_id:
            raise Refused(
                Code.PERMISSION_DENIED, f"the token of rank {rank} belongs to another engine instance"
            )
        claim = _Claim(session.number, rank)
        former = self._claimed.pop(claim, None)
        if former is not None:
            del self._claims[former]  # one worker a rank: what a session may claim is bounded
        displaced = self._claims.get(digest)
        if displaced is not None:
            del self._claimed[displaced]
        self._claims[digest] = claim
        self._claimed[claim] = digest

    def claimed_by(self, mapping: Mapping) -> SessionNumber | None:
        """The session that named this worker's token with this worker's rank."""
        claim = self._claims.get(mapping.token_digest)
        return claim.session if claim is not None and claim.rank == mapping.rank else None

    def parked_for(self, session: SessionNumber) -> list[Mapping]:
        """Connected workers that this session claimed and that are not paired with it yet."""
        return [
            m
            for m in self.mappings.values()
            if m.connected and m.session != session and self.claimed_by(m) == session
        ]

    def of_instance(self, instance_id: bytes) -> list[Mapping]:
        return [m for m in self.mappings.values() if m.identity.instance_id == instance_id]

    def forget_session(self, session: SessionNumber) -> None:
        """The session is over: its claims are void, its workers wait for the next one."""
        self._claims = {d: c for d, c in self._claims.items() if c.session != session}
        self._claimed = {c: d for d, c in self._claims.items()}
        for mapping in self.mappings.values():
            if mapping.session == session:
                mapping.session = None

    # Quarantine.

    def quarantine(
        self,
        session: Session,
        namespace: Namespace,
        slots: list[SlotIndex],
        read: list[SlotIndex],
        now: float,
        *,
        ranks: Iterable[int] | None = None,
        store_ids: Iterable[StoreId] = (),
    ) -> Quarantine:
        """Fences the workers of this engine and keeps slots until all have answered.

        Args:
            ranks: only these ranks are not known to be quiet; None for all.
            store_ids: only these stores are fenced; without any, all of the session.
        """
        wanted = None if ranks is None else set(ranks)
        workers = [
            m
            for m in self.of_instance(session.identity.instance_id)
            if (m.segments or m.retiring) and (wanted is None or m.rank in wanted)
        ]
        entry = Quarantine(
            session.number,
            session.label,
            session.identity,
            namespace,
            slots,
            read,
            {m.id for m in workers},
            now,
        )
        ids = list(store_ids)
        below = SessionNumber(0) if ids else SessionNumber(session.number + 1)
        self.quarantines[entry] = None
        self._slots_of[session.identity.instance_id] += len(slots)
        self._read_of[session.identity.instance_id] += len(read)
        for mapping in workers:
            mapping.last_fence += 1
            mapping.open_fences[mapping.last_fence] = entry
            if mapping.connected:
                self._outbox.fence(mapping.id, mapping.last_fence, below, ids)
        if not workers:
            self._released(entry)
        return entry

    def quarantined_slots(self, instance_id: bytes) -> int:
        """Slots that this engine's workers may still write."""
        return self._slots_of[instance_id]

    def quarantined_reads(self, instance_id: bytes) -> int:
        """Holds on chunks that this engine's workers may still read for sessions that are over."""
        return self._read_of[instance_id]

    def fenced(self, mapping: Mapping, fence: int) -> None:
        """A worker answered: everything ordered up to this fence is done.

        Raises:
            Refused: this fence was never sent.
        """
        if not 0 < fence <= mapping.last_fence:
            raise Refused(
                Code.INVALID_ARGUMENT, f"fence {fence} was never sent; the last one is {mapping.last_fence}"
            )
        for number in [f for f in mapping.open_fences if f <= fence]:
            self._answered(mapping.id, mapping.open_fences.pop(number))

    def ended(self, mapping: Mapping) -> None:
        """The worker is proven gone: it writes nothing and maps nothing."""
        del self.mappings[mapping.id]
        del self._by_token[mapping.token_digest]
        claim = self._claims.pop(mapping.token_digest, None)
        if claim is not None:
            del self._claimed[claim]
        self._spent[mapping.token_digest] = None
        while len(self._spent) > _MAX_SPENT_TOKENS:
            self._spent.popitem(last=False)
        for entry in mapping.open_fences.values():
            self._answered(mapping.id, entry)

    def _answered(self, mapping: MappingId, entry: Quarantine) -> None:
        entry.waiting.discard(mapping)
        if not entry.waiting:
            self._released(entry)

    def _released(self, entry: Quarantine) -> None:
        if entry not in self.quarantines:
            return
        del self.quarantines[entry]
        for kept, slots in ((self._slots_of, entry.slots), (self._read_of, entry.read)):
            kept[entry.identity.instance_id] -= len(slots)
            if not kept[entry.identity.instance_id]:
                del kept[entry.identity.instance_id]
        self._on_release(entry)


def _digest(token: bytes) -> bytes:
    # Looking a digest up tells nothing about the token by its timing.
    return hashlib.sha256(token).digest()
