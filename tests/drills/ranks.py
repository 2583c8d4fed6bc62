"""A fault plane for engines whose workers are processes of their own: orders are files in a folder.

Named in the environment as KVHOST_FAULT_PLANE=tests.drills.ranks:plane, its folder in KVHOST_DRILL_FAULTS. A
file `fail-DIRECTION-RANK` makes one chunk of that rank fail, and is gone afterwards.
"""

import os
import time
from pathlib import Path

from kvhost_connector.faults import VARIABLE, CopyFault, Direction

_FOLDER = "KVHOST_DRILL_FAULTS"


def calm(_: object = None) -> None:
    """Processes of one engine wait for each other by sleeping a little.

    vLLM's spin, with sched_yield: on a machine with as many cores as ranks the daemon is then not scheduled
    for seconds, and a drill about ranks becomes one about schedulers.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0002)


def environment(folder: Path) -> dict[str, str]:
    """For the engine."""
    return {VARIABLE: "tests.drills.ranks:plane", _FOLDER: str(folder)}


def order(folder: Path, direction: Direction, rank: int) -> Path:
    """One chunk of this rank fails; returns the file that is there until then."""
    file = folder / f"fail-{direction}-{rank}"
    file.touch()
    return file


def plane(direction: Direction, rank: int, job_id: int, chunk: int) -> None:
    """What workers call before each chunk."""
    file = Path(os.environ[_FOLDER]) / f"fail-{direction}-{rank}"
    try:
        file.unlink()
    except FileNotFoundError:
        return
    raise CopyFault(f"chunk {chunk} of {direction} {job_id} fails on purpose in rank {rank}")


# Workers import this module for the plane; the scheduler's process is told by the drill.
if _FOLDER in os.environ:
    calm()
