"""What every test uses: a real daemon, looks into processes, patterned bytes, waiting for conditions."""

from tests.support.ctl import ctl
from tests.support.daemon import Daemon
from tests.support.forks import fork_child, in_child
from tests.support.patterns import pat, pattern_word
from tests.support.processes import children, fd_count, map_count, memory_kib, process_state, thread_count
from tests.support.waiting import wait_for, wait_for_async

__all__ = [
    "Daemon",
    "children",
    "ctl",
    "fd_count",
    "fork_child",
    "in_child",
    "map_count",
    "memory_kib",
    "pat",
    "pattern_word",
    "process_state",
    "thread_count",
    "wait_for",
    "wait_for_async",
]
