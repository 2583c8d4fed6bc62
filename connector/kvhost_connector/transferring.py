"""Loads and stores of this engine: their slots, what the ranks say of them, and what follows from it.

A commit needs every writer's word for this very transfer (I2); what native believes does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext

from kvhost_client.types import StoreOf
from kvhost_connector.beliefs import Beliefs
from kvhost_connector.board import Board
from kvhost_connector.holds import Transfer, TransferTable
from kvhost_connector.metadata import Epoch, SlotSpec, TransferId, TransferReport
from kvhost_connector.requests import RequestView

FindView = Callable[[str], RequestView | None]


class Shortfall(NamedTuple):
    """A request whose chunks from `chunk` on, in this group, found no grant and must be offered again."""

    req_id: str
    position: int
    chunk: int


class Offered(NamedTuple):
    """A chunk that native offers to be stored: where it ends, and its place in the request."""

    key: OffloadKey
    end: int
    position: int
    chunk: int


def _nothing() -> PrepareStoreOutput:
    return PrepareStoreOutput([], refusal("nothing is stored"), [])


def refusal(why: str) -> SlotSpec:
    """The host side of a job that must be reported failed."""
    return SlotSpec(TransferId(0), Epoch(0), 0, 0, 0, (), problem=why)


class Transferring:
    """All transfers of one engine. `epoch` counts its weights: older transfers must not take effect."""

    def __init__(
        self, board: Board, beliefs: Beliefs, view: FindView, *, ranks: int, writers: Sequence[int]
    ) -> None:
        self._board = board
        self._beliefs = beliefs
        self._view = view
        self._table = TransferTable(ranks, writers)
        self.epoch = Epoch(0)
        # (request, group) -> first chunk that found no grant.
        self._owed: dict[tuple[str, int], int] = {}

    @property
    def open(self) -> int:
        """Transfers that some rank has still to report."""
        return len(self._table)

    # Loads.

    def load(self, view: RequestView, keys: Collection[bytes]) -> SlotSpec:
        """The slots of pinned keys. One that is not pinned makes a job that the workers report failed."""
        authority = self._board.authority
        if authority is None or view.authority != authority:
            return self._cannot_load(view, keys, "the session in which its chunks were held is over")
        missing = sum(key not in view.pins for key in keys)
        if missing:
            return self._cannot_load(view, keys, f"{missing} of {len(keys)} chunks to load are not held")
        pins = [view.pins.pop(key) for key in keys]
        transfer = self._table.open_load(
            authority, self.epoch, req_id=view.req_id, keys=tuple(keys), pins=tuple(pins)
        )
        return _spec(transfer, [pin.slot for pin in pins])

    def _cannot_load(self, view: RequestView, keys: Collection[bytes], why: str) -> SlotSpec:
        view.failed.update(keys)
        self._board.counters.add("failed_loads")
        return refusal(why)

    # Stores.

    def store(
        self, view: RequestView, keys: Collection[OffloadKey], context: ReqContext
    ) -> PrepareStoreOutput:
        """Slots for the chunks that nobody has: at once, for as many as grants are at hand.

        The rest is owed: native would not offer it again by itself, and refusing it all would have native
        log a warning in every step (contract 14).
        """
        authority = self._board.authority
        wanted = self._wanted(view, keys, context) if authority is not None else []
        if not wanted or authority is None:
            return _nothing()
        grants = self._board.stock.take(authority.serial, len(wanted))
        chosen = wanted
        if len(grants) < len(wanted):
            # A prefix of every group, as far as possible to the same token: a hit needs all groups.
            nearest = sorted(wanted, key=lambda chunk: chunk.end)
            self._fall_short(view, nearest[len(grants) :])
            accepted = {place.key for place in nearest[: len(grants)]}
            chosen = [place for place in wanted if place.key in accepted]
        if not grants:
            return _nothing()
        accepted_keys = [place.key for place in chosen]
        chunks = [view.chunk(place.key, place.position, place.chunk) for place in chosen]
        self._beliefs.storing({chunk.key: key for chunk, key in zip(chunks, accepted_keys, strict=True)})
        transfer = self._table.open_store(
            authority,
            self.epoch,
            req_id=view.req_id,
            keys=tuple(accepted_keys),
            chunks=tuple(chunks),
            grants=tuple(grants),
        )
        stores = [grant.store_id for grant in grants]
        self._board.assign(authority, list(map(StoreOf, stores, chunks)))
        return PrepareStoreOutput(
            accepted_keys, _spec(transfer, [grant.slot for grant in grants], stores), []
        )

    def _wanted(self, view: RequestView, keys: Collection[OffloadKey], context: ReqContext) -> list[Offered]:
        """The chunks that are worth a slot: nobody has or writes them, and a lookup could reach them.

        It could not where something before the first of them was removed. What was removed and is offered
        here is stored again with what builds on it.
        """
        self._beliefs.mark_cuts(view)
        storing, stored, end_of = self._table.storing, self._beliefs.stored, context.get_offload_key_position
        plain = not view.adapter
        firsts: dict[int, int] = {}
        wanted = []
        for key in keys:
            wire = key if plain else view.wire(key)
            if wire in storing or wire in stored:
                continue
            end = end_of(key) or 0
            position, index = view.place(key, end)
            if not view.is_cut_off(position, firsts.setdefault(position, index)):
                wanted.append(Offered(key, end, position, index))
        return wanted

    def _fall_short(self, view: RequestView, left: Sequence[Offered]) -> None:
        self._board.counters.add("stores_without_grant", len(left))
        for _, _, position, index in left:
            place = (view.req_id, position)
            self._owed[place] = min(self._owed.get(place, index), index)

    def take_shortfalls(self, *, windowed: bool) -> list[Shortfall]:
        """What native should offer again, of groups with windowed (or state) layers or of the others.

        Blocks of full attention stay with their request: they may be offered whenever a grant is there. Those
        of a window may be given to somebody else: only in the very next step.
        """
        if not self._owed:
            return []
        hope = self._board.grants_to_come if windowed else len(self._board.stock) > 0
        if not hope:
            return []
        due = [
            Shortfall(req_id, position, chunk)
            for (req_id, position), chunk in self._owed.items()
            if (view := self._view(req_id)) is not None and view.groups[position].prefix != windowed
        ]
        for req_id, position, _ in due:
            del self._owed[req_id, position]
        return due

    def drop_shortfalls(self) -> None:
        """Windowed chunks that were not offered again in time, and those of requests that are over."""
        if not self._owed:
            return
        self._owed = {
            (req_id, position): chunk
            for (req_id, position), chunk in self._owed.items()
            if (view := self._view(req_id)) is not None and view.groups[position].prefix
        }

    # Ends.

    def reported(self, reports: Iterable[TransferReport]) -> None:
        """What ranks said."""
        for report in reports:
            transfer = self._table.report(report.transfer_id, report.rank, report.ok)
            if transfer is None:
                continue
            if transfer.direction == "load":
                self._load_is_over(transfer)
            else:
                self._store_is_over(transfer)

    def _load_is_over(self, transfer: Transfer) -> None:
        self._board.release(transfer.authority, [pin.pin_id for pin in transfer.pins])
        if not transfer.ok:
            self._board.counters.add("failed_loads")
            view = self._view(transfer.req_id)
            if view is not None:
                view.failed.update(transfer.keys)

    def _store_is_over(self, transfer: Transfer) -> None:
        stores = [grant.store_id for grant in transfer.grants]
        if transfer.ok and not transfer.aborted and transfer.epoch == self.epoch:
            self._board.commit(transfer.authority, list(map(StoreOf, stores, transfer.chunks)))
            return
        self._board.counters.add("failed_stores")
        if not transfer.aborted:
            self._board.abort(transfer.authority, stores)

    def new_epoch(self) -> None:
        """What is on its way must not take effect. Ranks that have not reported may still write (I4)."""
        self.epoch = Epoch(self.epoch + 1)
        for transfer in self._table.stores():
            if not transfer.aborted:
                transfer.aborted = True
                self._table.unmark_storing(transfer)
                stores = [grant.store_id for grant in transfer.grants]
                self._board.abort(transfer.authority, stores, sorted(transfer.waiting))

    def delivered(self) -> None:
        """The step's jobs are on their way to the workers."""
        self._table.delivered()

    def drop_undelivered(self, req_id: str | None = None) -> None:
        """The step's jobs (of one request) will never reach a worker: nobody reads or writes their slots."""
        for transfer in self._table.take_undelivered(req_id):
            self._board.release(transfer.authority, [pin.pin_id for pin in transfer.pins])
            self._board.abort(transfer.authority, [grant.store_id for grant in transfer.grants])


def _spec(transfer: Transfer, slots: Sequence[int], store_ids: Sequence[int] = ()) -> SlotSpec:
    return SlotSpec(
        transfer.transfer_id,
        transfer.epoch,
        transfer.authority.session,
        transfer.authority.boot_id,
        transfer.authority.generation,
        tuple(slots),
        tuple(store_ids),
    )
