"""The thin line between kvhost and a device's driver: everything that needs a device goes through here.

What stands behind it in tests is a fake that records the order of calls and checks every address.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from typing import TYPE_CHECKING, Any, Protocol

from kvhost_connector.platforms import Platform

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingWorker

    from kvhost_connector.device.pages import DevicePages


logger = logging.getLogger("vllm.kvhost.worker")

# cudaStreamCaptureModeRelaxed, and hipStreamCaptureModeRelaxed.
_RELAXED = 2


class DriverError(Exception):
    """The driver refused; the message says what it was asked and what it answered."""


class Driver(Protocol):
    """What kvhost asks of a device."""

    def enter(self) -> None:
        """Call it first in every thread of kvhost's that uses the driver. A thread that did not choose its
        device would make a context on the first one, and hold memory there; one that asks the driver while
        the engine captures a graph would break the capture."""

    def register(self, address: int, nbytes: int) -> None:
        """Pins this memory and lets the device reach it. Blocks; holds no interpreter lock. Raises
        `DriverError`."""

    def unregister(self, address: int) -> None:
        """Takes that back. Raises `DriverError`."""

    def settle(self) -> None:
        """Returns when everything given to the device so far is done. Raises what the device answers when it
        cannot say: then nothing is known of what it still writes."""

    def transfers(self, pages: DevicePages, *, pinned: bool) -> OffloadingWorker:
        """A worker of vLLM's own that copies between these pages and rows of a `Window`.

        Each copy begins after all work that the calling thread's stream has been given before.
        """
        ...


class CudaDriver:
    """CUDA, and ROCm under the same names, through torch. `device` is the index of the worker's device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def enter(self) -> None:
        torch = _torch()
        torch.accelerator.set_device_index(self._device)
        _spare_captures(torch.version.cuda, torch.version.hip)

    def register(self, address: int, nbytes: int) -> None:
        # The flags are 0, as vLLM's own: with unified addresses the memory serves every context anyway.
        self._check(_torch().cuda.cudart().cudaHostRegister(address, nbytes, 0), "cudaHostRegister", nbytes)

    def unregister(self, address: int) -> None:
        self._check(_torch().cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister", None)

    def settle(self) -> None:
        _torch().accelerator.synchronize(self._device)

    def transfers(self, pages: DevicePages, *, pinned: bool) -> OffloadingWorker:
        from kvhost_connector.device.region import vllm_transfers

        return vllm_transfers(pages, pinned=pinned)

    def _check(self, result: Any, call: str, nbytes: int | None) -> None:
        code = int(getattr(result, "value", result))
        if code:
            size = "" if nbytes is None else f" of {nbytes} bytes"
            raise DriverError(f"{call}{size} on device {self._device} failed with code {code}")


class XpuDriver:
    """XPU, through the operations that vLLM registers with torch."""

    def __init__(self, device: int) -> None:
        self._device = device

    def enter(self) -> None:
        _torch().accelerator.set_device_index(self._device)

    def register(self, address: int, nbytes: int) -> None:
        if not _torch().ops._C.xpu_host_register(address, nbytes):
            raise DriverError(f"xpu_host_register of {nbytes} bytes on device {self._device} failed")

    def unregister(self, address: int) -> None:
        if not _torch().ops._C.xpu_host_unregister(address):
            raise DriverError(f"xpu_host_unregister on device {self._device} failed")

    def settle(self) -> None:
        _torch().accelerator.synchronize(self._device)

    def transfers(self, pages: DevicePages, *, pinned: bool) -> OffloadingWorker:
        from kvhost_connector.device.region import vllm_transfers

        return vllm_transfers(pages, pinned=pinned)


def driver_of(platform: Platform, device: int) -> Driver:
    """The driver of a platform that has one."""
    return XpuDriver(device) if platform is Platform.XPU else CudaDriver(device)


def can_register(driver: Driver) -> str:
    """Tries a page of memory. Empty when the driver registers memory, else why not, in one line.

    In a thread of its own: an error of CUDA's stays pending in the thread that made it, and the engine's
    next kernel would report it.
    """
    found: list[str] = []

    def attempt() -> None:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            held = ctypes.c_char.from_buffer(page)
            address = ctypes.addressof(held)
            try:
                driver.enter()
                driver.register(address, mmap.PAGESIZE)
                driver.unregister(address)
            except Exception as error:  # whatever it was, it is the answer
                found.append(f"{type(error).__name__}: {error}")
            del held

    thread = threading.Thread(target=attempt, name="kvhost-driver-probe", daemon=True)
    thread.start()
    thread.join()
    return found[0] if found else ""


def _spare_captures(cuda: str | None, hip: str | None) -> None:
    """What this thread asks of the runtime from now on does not break a graph that another one captures.

    By default a capture forbids calls that may block, registration and asking an event among them, to all
    threads of the process. torch has no name for this, so the runtime that it loaded is asked itself; `cuda`
    and `hip` are torch's versions of it. Where that fails the mode stays as it was: only a capture at an
    unlucky moment is at risk.
    """
    major = (cuda or hip or "").partition(".")[0]
    library, call = (
        (f"libcudart.so.{major}", "cudaThreadExchangeStreamCaptureMode")
        if cuda
        else (f"libamdhip64.so.{major}", "hipThreadExchangeStreamCaptureMode")
    )
    mode = ctypes.c_int(_RELAXED)
    try:
        code = getattr(ctypes.CDLL(library), call)(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        logger.debug("kvhost: the capture mode of this thread stays as it is: %s", error)
        return
    if code:
        logger.debug("kvhost: %s failed with code %d", call, code)


def _torch() -> Any:
    import torch

    return torch
