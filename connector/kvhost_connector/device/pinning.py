"""Segments and the driver: registered piece by piece on the link's thread, released before they are unmapped.

What is pinned is a matter of speed, not of right or wrong: where the driver refuses, copies of those segments
run unpinned, one line says so, and `state` shows it; unless the setting requires pinned memory.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial

import numpy as np

from kvhost_client.errors import HandoverFailed
from kvhost_client.mapping import Segment
from kvhost_client.memory import PAGE, Region
from kvhost_connector.config import ConfigError, Pin
from kvhost_connector.device.driver import Driver, DriverError, can_register
from kvhost_connector.pages import Numbers

PIECE_BYTES = 64 << 20
"""Registered in one call, at most (but at least one slot): while a driver pins memory, other calls of the
process to it wait."""

PAUSE_PART = 0.25
"""After each piece they have so much of its time for themselves, but not longer than `_PAUSE_S`."""

_PAUSE_S = 0.05

logger = logging.getLogger("vllm.kvhost.worker")


class PinState(Enum):
    """What is known of a worker's segments; the values are the names in reports and metrics."""

    OFF = "off"
    WAITING = "waiting"
    PINNED = "pinned"
    UNPINNED = "unpinned"


class Pinning:
    """Registers the segments of one worker. A registrar of `kvhost_client`.

    The link's thread registers and releases; the engine's thread asks `covers`.
    """

    def __init__(
        self, policy: Pin, piece_bytes: int = PIECE_BYTES, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._policy = policy
        self._piece_bytes = piece_bytes
        self._pause = pause
        self._driver: Driver | None = None
        # Addresses of the pieces of a region that are registered, by the region's own; the link's thread's.
        self._pieces: dict[int, list[int]] = {}
        # Where regions that are registered whole begin and end, ascending; replaced, never changed.
        self._ranges: tuple[Numbers, Numbers] = _ranges(())
        self._refused = ""

    def use(self, driver: Driver) -> None:
        """Sets the driver, before the link starts."""
        self._driver = driver

    def require_driver(self) -> None:
        """Raises `ConfigError` where pinned memory is required and the driver pins none at all."""
        if self._policy is not Pin.REQUIRED or self._driver is None:
            return
        why = can_register(self._driver)
        if why:
            raise ConfigError(
                f'"pin" in kv_connector_extra_config is "required", and the driver registers no memory '
                f'({why}): set it to "auto" to run unpinned'
            )

    @property
    def state(self) -> PinState:
        if self._policy is Pin.OFF:
            return PinState.OFF
        if self._refused:
            return PinState.UNPINNED
        return PinState.PINNED if len(self._ranges[0]) else PinState.WAITING

    @property
    def problem(self) -> str:
        """Why nothing may be copied: pinned memory is required and the driver refused. Else empty."""
        return self._refused if self._policy is Pin.REQUIRED else ""

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that are registered now."""
        starts, ends = self._ranges
        return int((ends - starts).sum())

    def covers(self, starts: Numbers, ends: Numbers) -> bool:
        """Whether the memory between each of these addresses is registered, whole."""
        first, behind = self._ranges
        at = np.searchsorted(first, starts, side="right") - 1
        return not len(starts) or bool((at >= 0).all() and (ends <= behind[at]).all())

    def register(self, segments: Sequence[Segment]) -> Iterator[None]:
        """One piece of a segment a step. When the driver refuses one, what this call registered is released
        again, and nothing is tried any more: a limit that was met once would be met each time."""
        driver = self._driver
        if self._policy is Pin.OFF or driver is None:
            return
        if self._refused:
            self._refuse_if_required()
            return
        began = time.monotonic()
        done: list[Region] = []
        for segment in segments:
            try:
                yield from self._register(driver, segment, done)
            except Exception as error:  # whatever a driver raises, it has not registered
                self._refused = str(error) if isinstance(error, DriverError) else repr(error)
                self._roll_back(driver, done)
                self._say_refused(segment, len(segments))
                self._refuse_if_required()
                return
        took = time.monotonic() - began
        logger.info(
            "kvhost: %d segments with %d bytes registered in %.2f s",
            len(done),
            sum(r.nbytes for r in done),
            took,
        )

    def _register(self, driver: Driver, segment: Segment, done: list[Region]) -> Iterator[None]:
        region = segment.region
        for offset, nbytes in _cut(segment, self._piece_bytes):
            if not region.mapped:  # retired meanwhile, and released with that
                return
            began = time.monotonic()
            driver.enter()
            driver.register(region.address + offset, nbytes)
            if not offset:
                done.append(region)
                region.before_unmap(partial(self._release, driver, region))
            self._pieces.setdefault(region.address, []).append(region.address + offset)
            if offset + nbytes == region.nbytes:
                self._ranges = _ranges((*self._spans(), (region.address, region.address + region.nbytes)))
            self._pause(min(PAUSE_PART * (time.monotonic() - began), _PAUSE_S))
            yield

    def _release(self, driver: Driver, region: Region) -> None:
        """Raises `OSError` when the driver keeps a piece: the region must stay mapped then."""
        pieces = self._pieces.get(region.address, [])
        while pieces:
            try:
                driver.unregister(pieces[-1])
            except DriverError as error:
                raise OSError(str(error)) from error
            # The first that goes takes the region out of what copies may rely on.
            self._ranges = _ranges(span for span in self._spans() if span[0] != region.address)
            pieces.pop()
        self._pieces.pop(region.address, None)

    def _spans(self) -> Iterator[tuple[int, int]]:
        starts, ends = self._ranges
        return zip(starts.tolist(), ends.tolist(), strict=True)

    def _roll_back(self, driver: Driver, regions: Sequence[Region]) -> None:
        for region in reversed(regions):
            try:
                self._release(driver, region)
            except OSError as error:
                logger.error("kvhost: a segment stays registered until it is unmapped: %s", error)

    def _say_refused(self, segment: Segment, count: int) -> None:
        what = (
            "this engine runs without the cache, because pinned memory is required"
            if self._policy is Pin.REQUIRED
            else "transfers of these and later segments run unpinned, slower"
        )
        logger.warning(
            "kvhost: segment %d (of %d) was not registered with the device's driver: %s; %s",
            segment.segment_id,
            count,
            self._refused,
            what,
        )

    def _refuse_if_required(self) -> None:
        if self._policy is Pin.REQUIRED:
            raise HandoverFailed(f"pinned memory is required, and the driver refused it: {self._refused}")


def _ranges(spans: Iterable[tuple[int, int]]) -> tuple[Numbers, Numbers]:
    """(address, address behind it) of regions, as two ascending arrays."""
    starts, ends = np.array(sorted(spans), dtype=np.int64).reshape(-1, 2).T.copy()
    return starts, ends


def _cut(segment: Segment, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of a segment's pieces. They end where a page and a slot end: no copy lies in two."""
    total = segment.region.nbytes
    step = math.lcm(segment.geometry.slot_bytes, PAGE)
    step *= max(1, piece_bytes // step)
    for offset in range(0, total, step):
        yield offset, min(step, total - offset)
