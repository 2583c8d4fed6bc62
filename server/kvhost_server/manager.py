"""The manager: sessions and workers come and go here; everything is decided, nothing is done.

No I/O, no clock of its own, no locks: every call runs to its end on the one
event loop. What must happen elsewhere is ordered through the Outbox; long work
is left as chores that the shell runs in slices. The rooms: books.py (shared
state), attachment.py (who has mapped what), reading.py and writing.py (what
engines ask), stewardship.py (what people ask), slots.py, lending.py, custody.py.
"""

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvhost_server.attachment import Attachment
from kvhost_server.books import Books, ServiceState
from kvhost_server.custody import Access
from kvhost_server.errors import Code, Refused
from kvhost_server.ids import MappingId, NamespaceNumber, SegmentId, SessionNumber, SlotIndex
from kvhost_server.integrity import find_problems
from kvhost_server.namespace import Namespace, NamespaceSpec
from kvhost_server.notices import Ended, Outbox
from kvhost_server.policies import DEFAULT_POLICY
from kvhost_server.reading import Reading
from kvhost_server.sessions import PeerIdentity, Session
from kvhost_server.stewardship import give_up, reset_namespace
from kvhost_server.writing import Writing

MAX_SESSIONS = 1024
MAX_SESSIONS_OF_ONE_USER = 512
MAX_UNFINISHED = 64


class Manager:
    """Everything the daemon knows, and the comings and goings that change it.

    Args:
        boot_id: random 64-bit id of this daemon process (I6).
        segment_bytes: size of each pool segment.
        segments: how many segments the pool will have.
        outbox: carries out what is decided here.
        clock: seconds, monotonic.
        policy: name of the eviction policy of new namespaces.
    """

    def __init__(
        self,
        boot_id: int,
        segment_bytes: int,
        segments: int,
        outbox: Outbox,
        clock: Callable[[], float],
        *,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self.books = Books(boot_id, segment_bytes, segments, outbox, clock)
        self.attachment = Attachment(self.books)
        self.reading = Reading(self.books)
        self.writing = Writing(self.books, self.attachment)
        self._policy = policy
        self._by_secret: dict[bytes, Session] = {}
        self._by_digest: dict[bytes, Namespace] = {}
        self._last_session = 0
        self._last_namespace = 0

    @property
    def state(self) -> ServiceState:
        return self.books.state

    def check_integrity(self) -> list[str]:
        """Every contradiction in the books, one line each; empty when they agree."""
        return find_problems(self.books)

    # The pool.

    def set_state(self, state: ServiceState) -> None:
        self.books.state = state

    def segment_ready(self, pool_index: int) -> None:
        """A segment is populated: it may be lent (I9)."""
        self.attachment.segment_free(pool_index)

    def pool_ends_at(self, segments: int) -> None:
        """The pool turned out smaller than planned: there are this many segments, each ready (I9)."""
        del self.books.lending.states[segments:]
        self.books.lending.budget = segments

    def segments_missing(self, pool_indices: Sequence[int]) -> None:
        """There is no memory for these segments, by which the pool should have grown."""
        self.books.lending.missing(pool_indices)

    def segment_clean(self, pool_index: int) -> None:
        """A segment that came back was zeroed: it may be lent again."""
        self.attachment.segment_free(pool_index)

    def hole_detected(self, pool_index: int) -> None:
        """Pages of a segment vanished: what its namespace holds cannot be believed (I13)."""
        self.books.anomalies["hole_detected"] += 1
        for loan in list(self.books.lending.loans.values()):
            if loan.pool_index == pool_index and loan.segment_id in loan.namespace.row_of_segment:
                reset_namespace(self.books, loan.namespace)

    def tend(self) -> None:
        """Now and then: what is above the pool's budget and was held may go; namespaces with engines and no
        segment try again for one. When they came, every segment was held, and that this has changed nobody
        tells."""
        self.attachment.settle()
        self.attachment.grow_the_empty()

    # Sessions.

    def open_session(self, identity: PeerIdentity, label: str) -> Session:
        """A scheduler proved who it is. An older session of the same engine ends.

        Raises:
            Refused: too many sessions, too many of this engine that are not proven over, or the instance is
                another user's.
        """
        for old in [
            s for s in self.books.sessions.values() if s.identity.instance_id == identity.instance_id
        ]:
            if old.identity.uid != identity.uid:
                raise Refused(Code.PERMISSION_DENIED, "this engine instance belongs to another user")
            self.books.anomalies["session_replaced"] += 1
            self.end_session(old.number, "a newer session of the same engine was opened")
        unfinished = {
            q.session
            for q in self.books.custody.quarantines
            if q.identity.instance_id == identity.instance_id
        }
        if len(unfinished) >= MAX_UNFINISHED:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"{len(unfinished)} earlier sessions of this engine still wait for its workers to be proven "
                "quiet; end the workers that hang",
            )
        if len(self.books.sessions) >= MAX_SESSIONS:
            raise Refused(Code.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} sessions are open, which is the limit")
        theirs = sum(s.identity.uid == identity.uid for s in self.books.sessions.values())
        if theirs >= MAX_SESSIONS_OF_ONE_USER:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"uid {identity.uid} has {theirs} sessions open, which is the limit for one user",
            )
        self._last_session += 1
        session = Session(
            SessionNumber(self._last_session), secrets.token_bytes(16), identity, label, self.books.clock()
        )
        self.books.sessions[session.number] = session
        self._by_secret[_digest(session.secret)] = session
        self.books.counters["sessions_opened"] += 1
        return session

    def session(self, secret: bytes) -> Session:
        """The session of this secret.

        Raises:
            Refused: there is none (any more).
        """
        session = self._by_secret.get(_digest(secret))
        if session is None:
            raise Refused(
                Code.NOT_FOUND, "no such session: it ended, or belongs to another daemon; open a new one"
            )
        return session

    def end_session(self, number: SessionNumber, why: str) -> int:
        """Ends a session; what its workers may still touch is quarantined. Returns how many slots.

        Raises:
            Refused: no such session.
        """
        session = self.books.sessions.pop(number, None)
        if session is None:
            raise Refused(Code.NOT_FOUND, f"session {number} is not open")
        del self._by_secret[_digest(session.secret)]
        if session.namespace is not None:
            session.namespace.sessions.discard(number)
            self.books.lending.withdraw(session.namespace)
        slots = self._abandon(session)
        self.books.custody.forget_session(number)
        self.books.outbox.notice(number, Ended(why))
        return slots

    def declare(
        self, session: Session, spec: NamespaceSpec, tokens: Sequence[tuple[int, bytes]]
    ) -> tuple[Namespace, bool]:
        """Puts a session into a namespace and names its workers. Returns it and whether it existed.

        Raises:
            Refused: a slot does not fit a segment, or a token or rank is not this engine's.
        """
        layout = spec.layout
        if layout.slot_bytes > self.books.lending.segment_bytes:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"a slot of {layout.slot_bytes} bytes ({layout.shards} shards of {layout.shard_bytes}) does "
                f"not fit a segment of {self.books.lending.segment_bytes}; start kvhostd with a larger "
                "--segment-size, or use fewer blocks a chunk",
            )
        for rank, _ in tokens:
            if not 0 <= rank < layout.ranks:
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f"rank {rank} was named; the layout has ranks 0 to {layout.ranks - 1}",
                )
        digest = spec.digest()
        existed = digest in self._by_digest
        namespace = self._by_digest.get(digest) or self._new_namespace(digest, spec)
        for rank, token in tokens:
            self.books.custody.claim(session, rank, token)
        if session.namespace is not namespace:
            self._enter(session, namespace)
        for mapping in self.books.custody.parked_for(session.number):
            self.attachment.pair(mapping, session)
        self.attachment.refresh(session)
        return namespace, existed

    def reset_session(self, session: Session, weights_version: str) -> Namespace:
        """The engine's weights changed: it leaves its namespace for a fresh one (I12).

        Raises:
            Refused: no namespace was declared.
        """
        namespace = self.books.namespace_of(session)
        spec = namespace.spec.with_weights(weights_version)
        alone = namespace.sessions == {session.number} and namespace.digest != spec.digest()
        if alone and namespace.spec.unnamed:
            # Before the other one asks for a segment: it can have one of these.
            give_up(self.books, namespace)
        fresh, _ = self.declare(session, spec, ())
        return fresh

    # Workers.

    def worker_hello(
        self, instance_id: bytes, rank: int, access: int, token: bytes, identity: PeerIdentity
    ) -> MappingId:
        """A worker arrived; it gets segments when a session names its token.

        Raises:
            Refused: its token is malformed or spent, or too many workers wait.
        """
        if identity.instance_id != instance_id:
            raise Refused(Code.INVALID_ARGUMENT, "the instance id of HELLO differs from the connection's")
        mapping = self.books.custody.arrive(rank, Access(access), token, identity)
        claimed = self.books.custody.claimed_by(mapping)
        session = self.books.sessions.get(claimed) if claimed is not None else None
        if session is not None:
            if session.identity.instance_id != instance_id:
                self.books.custody.ended(mapping)
                raise Refused(Code.PERMISSION_DENIED, "this token belongs to another engine instance")
            self.attachment.pair(mapping, session)
            self.attachment.refresh(session)
        return mapping.id

    def worker_mapped(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None:
        """A worker has mapped these segments."""
        mapping = self.books.custody.mappings[mapping_id]
        for segment in segment_ids:
            if segment in mapping.segments:
                mapping.segments[segment] = True
            elif segment not in mapping.retiring:
                self.books.anomalies["foreign_segment"] += 1
        self.attachment.refresh_session_of(mapping)

    def worker_fenced(self, mapping_id: MappingId, fence: int) -> None:
        """A worker answered a fence.

        Raises:
            Refused: the fence was never sent.
        """
        try:
            self.books.custody.fenced(self.books.custody.mappings[mapping_id], fence)
        except Refused:
            self.books.anomalies["false_fence"] += 1
            raise

    def worker_retired(self, mapping_id: MappingId, segment_ids: Iterable[SegmentId]) -> None:
        """A worker has unmapped these segments."""
        mapping = self.books.custody.mappings[mapping_id]
        known = [s for s in segment_ids if s in mapping.segments or s in mapping.retiring]
        for segment in known:
            mapping.segments.pop(segment, None)
            mapping.retiring.discard(segment)
        self.books.lending.let_go(mapping_id, known)
        self.attachment.refresh_session_of(mapping)

    def worker_ended(self, mapping_id: MappingId) -> None:
        """PROOF that a worker is gone: it writes nothing and maps nothing any more (I4, I7)."""
        mapping = self.books.custody.mappings.get(mapping_id)
        if mapping is None:
            return
        self.books.custody.ended(mapping)
        self.books.lending.let_go(mapping_id, [*mapping.segments, *mapping.retiring])
        self.attachment.left(mapping)

    def worker_disconnected(self, mapping_id: MappingId) -> None:
        """The connection is gone, which proves nothing: its slots wait for `worker_ended`."""
        mapping = self.books.custody.mappings[mapping_id]
        mapping.connected = False
        self.attachment.left(mapping)

    # Inside.

    def _new_namespace(self, digest: bytes, spec: NamespaceSpec) -> Namespace:
        self.forget_empty_namespaces()
        self._last_namespace += 1
        number = NamespaceNumber(self._last_namespace)
        per_segment = self.books.lending.segment_bytes // spec.layout.slot_bytes
        namespace = Namespace(number, digest, spec, per_segment, self._policy, self.books.fates)
        self.books.namespaces[number] = namespace
        self._by_digest[digest] = namespace
        self.books.writing[number] = Counter()
        return namespace

    def forget_empty_namespaces(self) -> None:
        """An engine that resets often would leave one behind each time."""
        for namespace in list(self.books.namespaces.values()):
            used = namespace.sessions or namespace.segments or namespace.expecting
            if not (used or namespace.floor or namespace.cap):
                self.books.forget(namespace)
                del self._by_digest[namespace.digest]

    def _enter(self, session: Session, namespace: Namespace) -> None:
        """Moves a session. Its old grants are void; loads that run keep the chunks they read."""
        old = session.namespace
        if old is not None:
            old.sessions.discard(session.number)
            self.books.lending.withdraw(old)
            session.former_pins.update({pin: (old, slot) for pin, slot in session.pins.items()})
            session.pins = {}
            slots = [grant.slot for grant in session.grants.values()]
            stores = list(session.grants)
            for store, grant in list(session.grants.items()):
                self.books.end_grant(session, store, grant)
            if slots:
                self.books.quarantine(session, old, slots, [], store_ids=stores)
        session.namespace = namespace
        namespace.sessions.add(session.number)
        namespace.given_up_at = None
        if not namespace.segments:
            self.attachment.grow(namespace)
        for mapping_id in list(session.mapping_of_rank.values()):
            self.attachment.offer_all(self.books.custody.mappings[mapping_id], namespace)

    def _abandon(self, session: Session) -> int:
        """A session is over: its grants and pins wait for its workers' silence."""
        by_namespace: dict[NamespaceNumber, tuple[Namespace, list[SlotIndex], list[SlotIndex]]] = {}

        def of(namespace: Namespace) -> tuple[Namespace, list[SlotIndex], list[SlotIndex]]:
            return by_namespace.setdefault(namespace.number, (namespace, [], []))

        for store, grant in list(session.grants.items()):
            self.books.end_grant(session, store, grant)
            of(grant.namespace)[1].append(grant.slot)
        if session.namespace is not None:
            of(session.namespace)[2].extend(session.pins.values())
        for namespace, slot in session.former_pins.values():
            of(namespace)[2].append(slot)
        for namespace, slots, read in by_namespace.values():
            # Even without holds: a fence makes workers refuse jobs of the ended session.
            self.books.quarantine(session, namespace, slots, read)
        return self.books.quarantined(session)


def _digest(secret: bytes) -> bytes:
    # Looking a digest up tells nothing about the secret by its timing.
    return hashlib.sha256(secret).digest()
