"""What the scheduler half holds of the daemon's memory: authority, grants, pins, and transfers using them.

Everything here is bookkeeping of the engine's side; the daemon keeps its own and never trusts this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvhost_client.types import Chunk, Grant
from kvhost_connector.metadata import Epoch, TransferId
from kvhost_connector.tracing import spans


class Owner(NamedTuple):
    """The session that holds something. Every daemon counts its sessions from 1: the number alone could name
    one of another daemon (I6)."""

    boot_id: int
    session: int


NOBODY = Owner(0, 0)


class Authority(NamedTuple):
    """Under which session something was granted or pinned. With another one it is worth nothing (I6).

    `serial` counts the sessions of this engine; it also rises at a reset, so that what was taken for old
    weights is not used for new ones (I12).
    """

    serial: int
    session: int
    boot_id: int
    generation: int

    @property
    def owner(self) -> Owner:
        return Owner(self.boot_id, self.session)


class PinnedSlot(NamedTuple):
    """A chunk that cannot be evicted until the pin is released."""

    pin_id: int
    slot: int


@dataclass
class Transfer:
    """One load or store on its way through the workers."""

    transfer_id: TransferId
    direction: Literal["load", "store"]
    req_id: str
    authority: Authority
    epoch: Epoch
    keys: tuple[bytes, ...]
    chunks: tuple[Chunk, ...] = ()
    grants: tuple[Grant, ...] = ()
    pins: tuple[PinnedSlot, ...] = ()
    # Ranks that have not reported yet.
    waiting: set[int] = field(default_factory=set)
    ok: bool = True
    # The daemon already knows that this store will not be committed.
    aborted: bool = False


class TransferTable:
    """All transfers that some rank has still to report."""

    def __init__(self, ranks: int, writers: Sequence[int]) -> None:
        """`writers`: the ranks that write stores (one where all hold identical bytes). All ranks load."""
        self._ranks = frozenset(range(ranks))
        self._writers = frozenset(writers)
        self._last = 0
        self._delivered = 0
        self._open: dict[TransferId, Transfer] = {}
        # Keys that a store of this engine is writing.
        self.storing: dict[bytes, TransferId] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open_load(
        self,
        authority: Authority,
        epoch: Epoch,
        *,
        req_id: str,
        keys: tuple[bytes, ...],
        pins: tuple[PinnedSlot, ...],
    ) -> Transfer:
        """A load by all ranks; the pins are the transfer's from now on."""
        return self._add(
            Transfer(
                self._next(), "load", req_id, authority, epoch, keys, pins=pins, waiting=set(self._ranks)
            )
        )

    def open_store(
        self,
        authority: Authority,
        epoch: Epoch,
        *,
        req_id: str,
        keys: tuple[bytes, ...],
        chunks: tuple[Chunk, ...],
        grants: tuple[Grant, ...],
    ) -> Transfer:
        """A store by the ranks that write; the grants are the transfer's from now on."""
        transfer = self._add(
            Transfer(
                self._next(),
                "store",
                req_id,
                authority,
                epoch,
                keys,
                chunks=chunks,
                grants=grants,
                waiting=set(self._writers),
            )
        )
        for chunk in chunks:
            self.storing[chunk.key] = transfer.transfer_id
        return transfer

    def report(self, transfer_id: TransferId, rank: int, ok: bool) -> Transfer | None:
        """Notes what one rank said; the transfer when it was the last rank. Unknown and second reports change
        nothing."""
        transfer = self._open.get(transfer_id)
        if transfer is None or rank not in transfer.waiting:
            return None
        transfer.waiting.discard(rank)
        transfer.ok = transfer.ok and ok
        if transfer.waiting:
            return None
        self._close(transfer)
        spans.transfer_ends(transfer)
        return transfer

    def delivered(self) -> None:
        """All transfers so far are in the metadata that goes to the workers."""
        self._delivered = self._last

    def take_undelivered(self, req_id: str | None = None) -> list[Transfer]:
        """Transfers (of one request) that no worker will ever hear of, and so none will report."""
        lost = [
            transfer
            for transfer in self._open.values()
            if transfer.transfer_id > self._delivered and req_id in (None, transfer.req_id)
        ]
        for transfer in lost:
            self._close(transfer)
            spans.transfer_ends(transfer, heard=False)
        return lost

    def stores(self) -> list[Transfer]:
        """Stores that some rank has still to report."""
        return [transfer for transfer in self._open.values() if transfer.direction == "store"]

    def unmark_storing(self, transfer: Transfer) -> None:
        """The keys of an aborted store may be stored again before the ranks have reported it."""
        for chunk in transfer.chunks:
            if self.storing.get(chunk.key) == transfer.transfer_id:
                del self.storing[chunk.key]

    def _next(self) -> TransferId:
        self._last += 1
        return TransferId(self._last)

    def _add(self, transfer: Transfer) -> Transfer:
        self._open[transfer.transfer_id] = transfer
        spans.transfer_begins(transfer)
        return transfer

    def _close(self, transfer: Transfer) -> None:
        del self._open[transfer.transfer_id]
        self.unmark_storing(transfer)
