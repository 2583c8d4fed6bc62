"""Keeping segments in memory: mlock through ctypes, which lets other threads run meanwhile."""

import ctypes
import enum
import errno
import mmap
import os
import resource

from kvhost_server.units import format_size


class Lock(enum.StrEnum):
    """What `--lock` may ask."""

    OFF = "off"
    AUTO = "auto"
    REQUIRED = "required"


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class LockedMap:
    """A read-only mapping of a whole segment, locked; `close` unlocks and unmaps it.

    The daemon never touches the bytes through it. Blocks: make and close it off the loop.

    Raises:
        OSError: the kernel refused; nothing is left mapped.
    """

    def __init__(self, fd: int, size: int, piece: int) -> None:
        self._size = size
        self._address: int | None = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if self._address == _MAP_FAILED or self._address is None:
            self._address = None
            raise _error("mmap")
        for offset in range(0, size, piece):
            if _libc.mlock(self._address + offset, min(piece, size - offset)):
                error = _error("mlock")
                self.close()
                raise error

    def close(self) -> None:
        """Unmaps; a second call does nothing."""
        if self._address is not None:
            _libc.munmap(self._address, self._size)
            self._address = None


def lock_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes; None when there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def lock_advice(wanted: int, error: OSError) -> str:
    """Why `wanted` bytes were not locked, and what to do: the second half of a sentence."""
    limit = lock_limit()
    found = "RLIMIT_MEMLOCK sets no limit" if limit is None else f"RLIMIT_MEMLOCK is {format_size(limit)}"
    return (
        f"{format_size(wanted)} were to be locked, {found}, and {error.filename} failed with "
        f"{error.strerror}; set "
        "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container, or use --lock off"
    )


def sure_refusal(wanted: int) -> OSError | None:
    """The error that mlock will certainly give, known before any page is populated; None if it may
    succeed."""
    limit = lock_limit()
    if limit is None or wanted <= limit or _may_lock_beyond_limit():
        return None
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "mlock")


def _may_lock_beyond_limit() -> bool:
    """Whether we hold CAP_IPC_LOCK, as /proc says. (In a user namespace that may mean nothing: mlock
    tells.)"""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> 14 & 1)
    return False


def _error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), call)
