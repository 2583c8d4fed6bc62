"""How late the event loop is: what a handler that blocks costs everybody else."""

import asyncio

from kvhost_server.histogram import Histogram
from kvhost_server.measures import LATENCY_BOUNDS_S

_INTERVAL_S = 0.1
_LATE_S = 0.1


class LoopLag:
    """Wakes ten times a second and measures by how much it was late.

    `late` counts the times it was more than 100 ms.
    """

    def __init__(self) -> None:
        self.largest_s = 0.0
        self.seconds = Histogram(LATENCY_BOUNDS_S)
        self.late = 0

    @property
    def largest_us(self) -> int:
        """In microseconds."""
        return int(self.largest_s * 1e6)

    async def watch(self) -> None:
        """Measures for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            lag = loop.time() - due
            self.largest_s = max(self.largest_s, lag)
            self.seconds.observe(lag)
            self.late += lag > _LATE_S
