"""Shared memory as the kernel gives it: checking, mapping, prefaulting and unmapping one segment.

Through ctypes, for two reasons: these calls may take long and must not hold the interpreter lock
(`mmap.madvise` does), and a forked child must not unmap by accident what it never had mapped.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

from kvhost_client.errors import HandoverFailed

PAGE = mmap.PAGESIZE

MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _fail(call: str, nbytes: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call} of {nbytes} bytes: {os.strerror(number)}")


class Region:
    """One shared mapping of this process. Owns it: `unmap` ends it, once."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Maps all of the file, readable and writable, for this process only. Raises `OSError`.

        Forked children do not inherit it. Core dumps leave it out: prompts can be made of what it holds.

        The descriptor stays the caller's.
        """
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == _MAP_FAILED:
            raise _fail("mmap", nbytes)
        self.address: int = address
        self.nbytes = nbytes
        self._mapped = True
        self._release: Callable[[], None] | None = None
        # Nothing is left to prefault, or nothing can be: writes meet no page fault that could be spared.
        self.prefaulted = False
        # Held for one piece of prefaulting, or for unmapping; never wanted by an engine's threads.
        self._lock = threading.Lock()
        for advice, name in ((_MADV_DONTFORK, "MADV_DONTFORK"), (_MADV_DONTDUMP, "MADV_DONTDUMP")):
            if _libc.madvise(address, nbytes, advice) != 0:
                error = _fail(f"madvise({name})", nbytes)
                self.unmap()
                raise error

    @property
    def mapped(self) -> bool:
        """Whether the mapping is there."""
        return self._mapped

    def before_unmap(self, release: Callable[[], None]) -> None:
        """`release` is called once, before the mapping goes: whoever told a device of this memory must take
        it back first. If it raises `OSError` the mapping stays."""
        self._release = release

    def populate(self, offset: int, nbytes: int) -> bool:
        """Makes the pages of a range present and writable for this process; contents stay.

        False when the region was unmapped meanwhile. Raises `OSError`.
        """
        with self._lock:
            if not self._mapped:
                return False
            self.populate_now(offset, nbytes)
            return True

    def populate_now(self, offset: int, nbytes: int) -> None:
        """`populate` for a caller under whom nothing is unmapped: it waits for nobody. Raises `OSError`."""
        while _libc.madvise(self.address + offset, nbytes, MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINTR:
                raise _fail("madvise(MADV_POPULATE_WRITE)", nbytes)

    def unmap(self) -> None:
        """Ends the mapping; a second call does nothing. Raises `OSError`."""
        with self._lock:
            if not self._mapped:
                return
            if self._release is not None:
                self._release()
                self._release = None
            self._mapped = False
            if _libc.munmap(self.address, self.nbytes) != 0:
                raise _fail("munmap", self.nbytes)


def check_sealed_file(descriptor: int, nbytes: int) -> None:
    """Raises `HandoverFailed` unless this is a memory file of exactly this size that nobody can resize.

    Without the seals any holder of the file could cut it, and the next touch would kill this process.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise HandoverFailed(f"the descriptor given for a segment is not a memory file ({error})") from error
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & needed != needed:
        raise HandoverFailed(
            f"the memory file given for a segment has seals {seals:#x}, "
            f"F_SEAL_SHRINK and F_SEAL_GROW ({needed:#x}) must be set: it is not one of kvhostd's"
        )
    size = os.fstat(descriptor).st_size
    if size != nbytes:
        raise HandoverFailed(f"the memory file given for a segment has {size} bytes, {nbytes} were announced")
