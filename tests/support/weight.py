"""The processor weight that the systemd unit gives the daemon, for a daemon that a test starts.

An engine in several processes spins on a processor for each. Where the kernel shares processors between
sessions first and processes second (autogroup; control groups do the same), a daemon that sleeps nearly
always waits for up to half a second for its turn, on a machine with as many processors as the engine has
processes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

# About `CPUWeight=1000` in deploy/systemd/kvhostd.service: ten times an engine's weight.
AUTOGROUP_NICE = -10


def weigh_as_service(pid: int) -> None:
    """Gives the session that `pid` leads the unit's weight; nothing where that is not allowed."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(f"{AUTOGROUP_NICE}\n")
