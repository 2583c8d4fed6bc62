"""The compiled copying of `native.c`, reached through ctypes: many blocks in one call, without the GIL.

It is built when kvhost is installed, where a C compiler is. Addresses are not checked here: who makes them
checks the numbers that they are made from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from kvhost_connector.faults import Direction
from kvhost_connector.pages import Numbers, Spans, check_numbers

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
        self._copy.argtypes = [*[ctypes.c_int] * 2, *[ctypes.c_size_t] * 2, *[ctypes.c_void_p] * 6]
        self.kernel = Kernel(best())

    def copy(
        self,
        direction: Direction,
        spans: Spans,
        blocks: Numbers,
        images: Numbers,
        kernel: Kernel | None = None,
    ) -> None:
        """Copies the spans of block `blocks[n]` to ("store") or from ("load") its image at address
        `images[n]`, for every n.

        All of it is readable or writable memory that stays so until this returns; no destination overlaps
        anything else of the list. `kernel` is PLAIN or at most `self.kernel`. Raises `ValueError`.
        """
        check_numbers(blocks, images)
        chosen = self.kernel if kernel is None else kernel
        if chosen > self.kernel:
            raise ValueError(f"this processor has no {chosen.name}; its best is {self.kernel.name}")
        self._copy(
            chosen,
            direction == "store",
            len(blocks),
            len(spans.bytes),
            blocks.ctypes.data,
            images.ctypes.data,
            *spans.pointers,
        )


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
