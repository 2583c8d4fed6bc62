"""The compiled copying of `native.c`, reached through ctypes: many byte ranges in one call, without the GIL.

It is built when kvhost is installed, where a C compiler is. Addresses are not checked here: who makes them
checks the numbers that they are made from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""Addresses or sizes in bytes; one dimension, contiguous."""

_NAME = "_native"
_FOLDER = Path(__file__).parent
_REMEDY = (
    "install kvhost again on a machine with a C compiler (cc), or set copy to auto or numpy in "
    "kv_connector_extra_config"
)


class NativeMissing(RuntimeError):
    """The compiled copying cannot be used; the message is one line that says why and what to do."""


class Kernel(IntEnum):
    """How ranges are moved; the numbers are those of native.c. AVX2 and AVX512 store past the caches."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2


class Native:
    """The loaded library. `kernel` is the best one that this processor has."""

    def __init__(self, path: Path) -> None:
        """Raises `NativeMissing` for a file that is not the library."""
        try:
            library = ctypes.CDLL(str(path))
            best: Callable[[], int] = library.kvhost_best_kernel
            self._copy = library.kvhost_copy
        except (OSError, AttributeError) as error:
            raise NativeMissing(
                f"the compiled copying of kvhost cannot be loaded ({error}): {_REMEDY}"
            ) from error
        self._copy.restype = None
        self._copy.argtypes = [ctypes.c_int, ctypes.c_size_t, *[ctypes.c_void_p] * 3]
        self.kernel = Kernel(best())

    def copy(self, to: Numbers, of: Numbers, sizes: Numbers, kernel: Kernel | None = None) -> None:
        """Copies `sizes[n]` bytes from address `of[n]` to address `to[n]`, for every n.

        Every range is readable or writable memory that stays so until this returns; no destination overlaps
        anything else of the list. `kernel` is PLAIN or at most `self.kernel`.
        """
        for array in (to, of, sizes):
            if array.dtype != np.int64 or array.shape != (len(to),) or not array.flags.c_contiguous:
                raise ValueError("addresses and sizes must be contiguous int64 arrays of one length")
        chosen = self.kernel if kernel is None else kernel
        if chosen > self.kernel:
            raise ValueError(f"this processor has no {chosen.name}; its best is {self.kernel.name}")
        self._copy(chosen, len(to), to.ctypes.data, of.ctypes.data, sizes.ctypes.data)


def library_path() -> Path | None:
    """The compiled file beside this module, None where none was built."""
    paths = (_FOLDER / f"{_NAME}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


def load_native(path: Path | None = None) -> Native:
    """The compiled copying. Raises `NativeMissing`."""
    found = path or library_path()
    if found is None:
        raise NativeMissing(f"kvhost was installed without its compiled copying: {_REMEDY}")
    return Native(found)
