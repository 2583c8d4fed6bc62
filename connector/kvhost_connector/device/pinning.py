"""Segments and the driver: registered one by one on the link's thread, released before they are unmapped.

What is pinned is a matter of speed, not of right or wrong: where the driver refuses, copies of those segments
run unpinned, one line says so, and `state` shows it; unless the setting requires pinned memory.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import partial

from kvhost_client.errors import HandoverFailed
from kvhost_client.mapping import Segment
from kvhost_client.memory import Region
from kvhost_connector.config import ConfigError, Pin
from kvhost_connector.device.driver import Driver, DriverError, can_register

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

    def __init__(self, policy: Pin) -> None:
        self._policy = policy
        self._driver: Driver | None = None
        # Sorted (address, address behind it); replaced, never changed.
        self._ranges: tuple[tuple[int, int], ...] = ()
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
        return PinState.PINNED if self._ranges else PinState.WAITING

    @property
    def problem(self) -> str:
        """Why nothing may be copied: pinned memory is required and the driver refused. Else empty."""
        return self._refused if self._policy is Pin.REQUIRED else ""

    @property
    def nbytes(self) -> int:
        """Bytes that are registered now."""
        return sum(end - start for start, end in self._ranges)

    def covers(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Whether all of these (address, bytes) are registered."""
        ranges = self._ranges
        for address, nbytes in spans:
            at = bisect.bisect_right(ranges, (address, 1 << 64)) - 1
            if at < 0 or address + nbytes > ranges[at][1]:
                return False
        return True

    def register(self, segments: Sequence[Segment]) -> Iterator[None]:
        """One segment a step. When the driver refuses one, those of this call before it are released again,
        and none is tried any more: a limit that was met once would be met each time."""
        driver = self._driver
        if self._policy is Pin.OFF or driver is None:
            return
        if self._refused:
            self._refuse_if_required()
            return
        began = time.monotonic()
        done: list[Region] = []
        for segment in segments:
            region = segment.region
            if not region.mapped:  # retired meanwhile
                continue
            try:
                driver.enter()
                driver.register(region.address, region.nbytes)
            except Exception as error:  # whatever a driver raises, it has not registered
                self._refused = str(error) if isinstance(error, DriverError) else repr(error)
                self._roll_back(driver, done)
                self._say_refused(segment, len(segments))
                self._refuse_if_required()
                return
            region.before_unmap(partial(self._release, driver, region))
            done.append(region)
            self._ranges = tuple(sorted((*self._ranges, (region.address, region.address + region.nbytes))))
            yield
        took = time.monotonic() - began
        logger.info(
            "kvhost: %d segments with %d bytes registered in %.2f s",
            len(done),
            sum(r.nbytes for r in done),
            took,
        )

    def _release(self, driver: Driver, region: Region) -> None:
        """Once for each region. Raises `OSError` when the driver keeps it: it must stay mapped then."""
        span = (region.address, region.address + region.nbytes)
        if span not in self._ranges:
            return  # rolled back before
        try:
            driver.unregister(region.address)
        except DriverError as error:
            raise OSError(str(error)) from error
        self._ranges = tuple(one for one in self._ranges if one != span)

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
