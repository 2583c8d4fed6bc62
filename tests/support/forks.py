"""Running a piece of code in a forked child of the test."""

import os
import sys
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> None:
    """Runs `work` in a child and waits for its end.

    Raises:
        AssertionError: it raised; its traceback went to stderr.
    """
    pid = fork_child(work)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {os.waitstatus_to_exitcode(status)}; see stderr"


def fork_child(work: Callable[[], object]) -> int:
    """Starts `work` in a child; returns its pid, for `os.waitpid`. The child ends without the parent's
    atexit."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)
