"""One connection of a worker to one daemon boot: from HELLO until BYE, a refusal or end-of-file.

Runs on the link's thread. Orders of the daemon are answered when they are carried out, in the order given;
meanwhile later packets are read.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvhost_client import fork, version
from kvhost_client.errors import HandoverFailed, KVHostError, NotKVHost
from kvhost_client.handover import HandoverSocket, Packet, refused
from kvhost_client.mapping import Geometry, Registrar, Segment, WorkerMapping
from kvhost_client.prefault import Prefaulter
from kvhost_client.wake import Wake
from kvhost_proto.v1 import handover_pb2

logger = logging.getLogger(__name__)

# How long to wait, after BYE, for the daemon to hang up.
_HEAR_OUT_S = 0.5


class TokenSpent(Exception):
    """This daemon boot has seen the token before, on another connection: present a new one."""


@dataclass(frozen=True)
class Remains:
    """Segments of a dead mapping: unmapped as soon as the copies that had begun have ended."""

    mapping: WorkerMapping
    epoch: int
    segments: Sequence[Segment]

    def settle(self) -> bool:
        """Unmaps if no copy runs any more; False if one still does."""
        if not self.mapping.quiet(self.epoch):
            return False
        self.mapping.forget()
        unmap(self.segments)
        return True


@dataclass(frozen=True)
class Order:
    """Something the daemon asked for that waits for copies to end."""

    epoch: int
    unmap: Sequence[Segment]
    answer: handover_pb2.ToDaemon


def unmap(segments: Sequence[Segment]) -> bool:
    """Unmaps; what cannot be unmapped is logged and stays. True when nothing stays."""
    complete = True
    for segment in segments:
        try:
            segment.region.unmap()
        except OSError as error:
            complete = False
            logger.error("segment %d stays mapped: %s", segment.segment_id, error)
    return complete


class Attachment:
    """What a worker has of one daemon boot."""

    def __init__(
        self,
        handover: HandoverSocket,
        wake: Wake,
        prefaulter: Prefaulter,
        spent_boot: int | None,
        on_mapped: Callable[[WorkerMapping], None],
        *,
        registrar: Registrar | None = None,
    ) -> None:
        """`spent_boot` is the boot at which the token was presented before, if any.

        `on_mapped` is called once, with the mapping, when the first segments are mapped, and registered with
        a device where there is a `registrar`.
        """
        self._handover = handover
        self._wake = wake
        self._prefaulter = prefaulter
        self._spent_boot = spent_boot
        self._on_mapped = on_mapped
        self._registrar = registrar
        # Segments that are mapped and whose registration is under way, in the order of their coming.
        self._registering: deque[tuple[Sequence[Segment], Iterator[None]]] = deque()
        self._orders: deque[Order] = deque()
        self._published = False
        self._leaving = False
        self._said_bye = False
        self.mapping: WorkerMapping | None = None

    @property
    def served(self) -> bool:
        """It got as far as mapped segments."""
        return self._published

    @property
    def boot_id(self) -> int | None:
        """The daemon's boot id; None before it has welcomed us."""
        return None if self.mapping is None else self.mapping.boot_id

    def run(self, hello: handover_pb2.Hello, tend: Callable[[], bool]) -> None:
        """Serves the connection until its end.

        `tend` is called after every ring of the bell: it does what else is due on this thread, and answers
        True when the link is being closed: then running copies are awaited, all is unmapped and BYE is said.

        Returns at end-of-file and after BYE. Raises `TokenSpent`, or a `KVHostError` for a refusal, a foreign
        daemon or segments that cannot be mapped. Call `remains` afterwards in every case.
        """
        poll = select.poll()
        poll.register(self._handover, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        self._handover.hello(hello)
        while True:
            if tend() and not self._leaving:
                self._leave()
            self._settle()
            if self._said_bye:
                self._hear_out()
                return
            ready = [number for number, _ in poll.poll(0 if self._registering else None)]
            if self._wake.fileno() in ready:
                self._wake.heard()
            try:
                if self._handover.fileno() in ready and not self._read():
                    return
                self._register_next()
            except KVHostError:
                self._part()
                raise

    def _part(self) -> None:
        """This connection cannot go on, but we live: unmap and, when nothing stays mapped, say BYE.

        Without it the daemon would keep our place, and whatever is quarantined for us, until this process
        ends: only then would it be proven that nothing is mapped any more (I4).
        """
        remains = self.remains()
        if remains is None or not remains.settle():
            return
        if any(segment.region.mapped for segment in remains.segments):
            return  # a device's driver keeps it
        self._orders.clear()
        self._said_bye = True
        try:
            self._handover.send(handover_pb2.ToDaemon(bye=handover_pb2.Bye()))
        except KVHostError as error:
            logger.debug("%s: it has hung up already", error)
            return
        self._hear_out()

    def _hear_out(self) -> None:
        """Reads until the daemon hangs up as well: closing on unread packets would take the BYE back."""
        until = time.monotonic() + _HEAR_OUT_S
        try:
            while self._handover.receive(until - time.monotonic()) is not None:
                continue
        except KVHostError as error:
            logger.debug("kvhostd did not hang up after BYE: %s", error)

    def remains(self) -> Remains | None:
        """What is still mapped. The mapping is dead from here on."""
        self._registering.clear()
        if self.mapping is None or self._said_bye:
            return None
        epoch, segments = self.mapping.die()
        unfinished = [segment for order in self._orders for segment in order.unmap]
        return Remains(self.mapping, epoch, [*segments, *unfinished])

    def _read(self) -> bool:
        """Handles what has arrived; False at end-of-file."""
        grown: list[Segment] = []
        with fork.guard:
            try:
                packet = self._handover.receive_now()
            except BlockingIOError:
                return True
            if packet is None:
                return False
            try:
                if packet.message.HasField("segments"):
                    grown = self._map(packet)
            finally:
                packet.close()
        if not packet.message.HasField("segments"):
            self._obey(packet.message)
        elif self._registrar is not None:
            self._registering.append((grown, self._registrar.register(grown)))
        else:
            self._mapped(grown)
        return True

    def _register_next(self) -> None:
        """Registers one segment: that takes long, and orders must be heard meanwhile."""
        if not self._registering or self._leaving:
            return
        segments, steps = self._registering[0]
        try:
            next(steps)
        except StopIteration:
            self._registering.popleft()
            # What was retired meanwhile is not reported.
            known = self._own_mapping().segment_ids
            self._mapped([segment for segment in segments if segment.segment_id in known])

    def _obey(self, message: handover_pb2.ToClient) -> None:
        kind = message.WhichOneof("kind")
        if kind == "refused":
            raise refused(self._handover.path, message.refused)
        if kind == "welcome":
            self._welcomed(message.welcome)
        elif kind == "fence":
            self._fence(message.fence)
        elif kind == "retire":
            self._retire(message.retire)
        else:
            raise NotKVHost(f"{self._handover.path} sent a worker {kind or 'an unknown message'}")

    def _welcomed(self, welcome: handover_pb2.Welcome) -> None:
        version.check(welcome.version, self._handover.path)
        if welcome.boot_id == self._spent_boot:
            raise TokenSpent
        if self.mapping is not None:
            raise HandoverFailed(f"{self._handover.path} said WELCOME twice")
        self.mapping = WorkerMapping(welcome.boot_id, self._wake.ring)

    def _map(self, packet: Packet) -> list[Segment]:
        segments = packet.message.segments
        mapping = self._own_mapping()
        if segments.stamp.boot_id != mapping.boot_id:
            raise HandoverFailed(
                f"{self._handover.path} sent segments of boot {segments.stamp.boot_id:016x} "
                f"on a connection of boot {mapping.boot_id:016x}"
            )
        geometry = Geometry(segments.slot_bytes, segments.shard_stride, segments.shards)
        return [
            mapping.map(segment, descriptor, geometry, segments.stamp.generation)
            for segment, descriptor in zip(segments.segments, packet.descriptors, strict=True)
        ]

    def _mapped(self, segments: Sequence[Segment]) -> None:
        if not self._published:
            self._published = True
            self._on_mapped(self._own_mapping())
        # First, so that whoever hears that all is mapped can ask whether all is prefaulted.
        for segment in segments:
            self._prefaulter.add(segment)
        answer = handover_pb2.MappedSegments(segment_ids=[segment.segment_id for segment in segments])
        self._handover.send(handover_pb2.ToDaemon(mapped=answer))

    def _fence(self, fence: handover_pb2.Fence) -> None:
        epoch = self._own_mapping().fence(fence.session_below, fence.store_ids)
        answer = handover_pb2.ToDaemon(fenced=handover_pb2.FenceDone(fence=fence.fence))
        self._orders.append(Order(epoch, (), answer))

    def _retire(self, retire: handover_pb2.Retire) -> None:
        epoch, segments = self._own_mapping().retire(retire.segment_ids)
        answer = handover_pb2.ToDaemon(retired=handover_pb2.Retired(segment_ids=retire.segment_ids))
        self._orders.append(Order(epoch, segments, answer))

    def _leave(self) -> None:
        self._leaving = True
        self._registering.clear()
        epoch, segments = (0, []) if self.mapping is None else self.mapping.die()
        self._orders.append(Order(epoch, segments, handover_pb2.ToDaemon(bye=handover_pb2.Bye())))

    def _settle(self) -> None:
        while self._orders and not self._said_bye:
            order = self._orders[0]
            if self.mapping is not None and not self.mapping.quiet(order.epoch):
                return
            bye = order.answer.HasField("bye")
            if bye and self.mapping is not None:
                self.mapping.forget()
            self._orders.popleft()
            if not unmap(order.unmap):
                raise HandoverFailed(
                    "a segment could not be unmapped: its end is proven by the process's end"
                )
            self._said_bye = bye
            self._handover.send(order.answer)

    def _own_mapping(self) -> WorkerMapping:
        if self.mapping is None:
            raise NotKVHost(f"{self._handover.path} gave orders before WELCOME")
        return self.mapping
