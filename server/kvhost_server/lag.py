"""How late the event loop is: what a handler that blocks costs everybody else."""

import asyncio

_INTERVAL_S = 0.1
_LATE_S = 0.1


class LoopLag:
    """Wakes ten times a second and measures by how much it was late."""

    def __init__(self) -> None:
        self.largest_s = 0.0
        self._late = 0

    @property
    def anomalies(self) -> dict[str, int]:
        """Times the loop was more than 100 ms late, and the largest lag in microseconds."""
        return {"loop_late": self._late, "loop_lag_max_us": int(self.largest_s * 1e6)}

    async def watch(self) -> None:
        """Measures for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            lag = loop.time() - due
            self.largest_s = max(self.largest_s, lag)
            self._late += lag > _LATE_S
