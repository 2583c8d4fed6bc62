"""How the daemon ends: its exit codes, and the one error that ends a start.

The numbers are those of sysexits.h: a service manager can tell "try again" from "mend the configuration".
"""

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of kvhostd, part of its interface."""

    OK = 0
    FAILED = 1
    """Something that should not happen; the log has the traceback."""
    USAGE = 64
    """A flag or an environment variable has a value that is not allowed."""
    UNAVAILABLE = 69
    """Another daemon serves this socket, or a socket cannot be made there."""
    MEMORY = 71
    """The memory cannot be had: it is beyond a hard limit, or populating it failed."""
    MEMORY_NOW = 75
    """The memory cannot be had now; a later start may succeed."""
    CONFIG = 78
    """The configuration file is wrong, or asks for what this host does not allow."""


class StartupError(Exception):
    """Why the daemon does not start (or ends itself): one sentence for a person, and the exit code.

    The sentence says what was asked, what was found, what is allowed, and what to do.
    """

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code
