"""A fake device: streams, events and copy engines of a GPU, in host memory, for tests without one.

Nothing runs when it is given to the device, only in `run`, in an order that streams and events allow. Every
copy is checked, address by address, when it is given and again when it runs: it must lie in the device's own
memory on one side and in memory that the host has mapped on the other. vLLM's real transfer worker runs on
it: `on_fake_device` puts it in the place of the platform, the events and the copy operation.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.cpu import gpu_worker

from kvhost_connector.device.driver import DriverError
from kvhost_connector.device.pages import DevicePages
from kvhost_connector.device.region import vllm_transfers


class Sticky(RuntimeError):
    """As CUDA's errors that stay: every later call raises it again."""


class DeviceTensor(torch.Tensor):
    """Host memory that says it is the device's."""

    is_cuda = True
    device = torch.device("cuda", 0)


def on_device(caches: Any) -> Any:
    """vLLM's CanonicalKVCaches, with tensors that say so."""
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=entry.tensor.as_subclass(DeviceTensor)) for entry in caches.tensors],
        group_data_refs=caches.group_data_refs,
    )


@dataclass
class Work:
    """One thing in a stream: waits for others, does something, or records an event."""

    name: str
    do: Callable[[], None] | None = None
    after: tuple[Stream, int] | None = None
    event: Event | None = None


class Stream:
    """A queue of the device."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.given = 0
        self.done = 0
        self.waiting: deque[Work] = deque()

    def give(self, work: Work) -> None:
        self.device.check()
        self.given += 1
        self.waiting.append(work)

    def wait_stream(self, other: Stream) -> None:
        self.device.log.append((self.name, f"waits for {other.name}"))
        self.give(Work("wait", after=(other, other.given)))

    def wait_event(self, event: Event) -> None:
        assert event.place is not None, "an event that was never recorded orders nothing"
        self.device.log.append((self.name, f"waits for an event of {event.place[0].name}"))
        self.give(Work("wait", after=event.place))


class Event:
    """An event of the device; `place` is where it was recorded last."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.place: tuple[Stream, int] | None = None
        self.at = 0

    def record(self, stream: Stream) -> None:
        stream.give(Work("record", event=self))
        self.place = (stream, stream.given)

    def query(self) -> bool:
        self.device.check()
        self.device.polled()
        return self.place is not None and self.place[0].done >= self.place[1]

    def synchronize(self) -> None:
        self.device.check()
        while not self.query():
            self.device.run(1)

    def elapsed_time(self, end: Event) -> float:
        self.device.check()
        return float(end.at - self.at) or 0.001


@dataclass
class Copied:
    """One copy as it ran."""

    stream: str
    direction: str
    src: int
    dst: int
    nbytes: int
    by_kernel: bool


@dataclass
class FakeDevice:
    """The device. With `eager` everything runs as soon as somebody asks for it; else only in `run`."""

    eager: bool = True
    streams: list[Stream] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    # Host memory that may be copied from and to, and what of it is registered: (address, behind).
    mapped: Callable[[], list[tuple[int, int]]] = list
    registered: list[tuple[int, int]] = field(default_factory=list)
    # (stream, what) in the order in which it was given.
    log: list[tuple[str, str]] = field(default_factory=list)
    copies: list[Copied] = field(default_factory=list)
    sticky: Sticky | None = None
    # Raised by the next copy operation that is given.
    refuse_next: list[Exception] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)
    clock: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.compute = self.stream("compute")
        self.current = threading.local()
        self.numbers = itertools.count(1)

    def stream(self, name: str = "") -> Stream:
        made = Stream(self, name or f"copy {len(self.streams)}")
        self.streams.append(made)
        return made

    def check(self) -> None:
        if self.sticky is not None:
            raise self.sticky

    def polled(self) -> None:
        if self.eager:
            self.run()

    def own(self, cache: Any) -> None:
        """This tensor's storage is the device's memory."""
        storage = cache.untyped_storage()
        self.memory.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    # Work.

    def kernel(self, do: Callable[[], None], name: str = "kernel") -> None:
        """A step of the engine, on its stream."""
        self.log.append(("compute", name))
        self.compute.give(Work(name, do=do))
        if self.eager:
            self.run()

    def swap(
        self,
        src: Any,
        dst: Any,
        sizes: Any,
        is_src_access_order_any: bool = False,
        by_kernel: bool = False,
    ) -> None:
        """In the place of vLLM's batched block copy (and of its copy kernel)."""
        if self.refuse_next:
            raise self.refuse_next.pop(0)
        stream = self.current.stream
        triples = list(zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True))
        direction = "store" if triples and self._is_own(triples[0][0], triples[0][2]) else "load"
        assert is_src_access_order_any == (direction == "load") or by_kernel
        self._check_copies(triples, direction, by_kernel)
        self.log.append((stream.name, f"{direction} of {len(triples)} pieces"))

        def do() -> None:
            self._check_copies(triples, direction, by_kernel)
            for source, target, nbytes in triples:
                ctypes.memmove(target, source, nbytes)
                self.copies.append(Copied(stream.name, direction, source, target, nbytes, by_kernel))

        stream.give(Work(direction, do=do))

    def _is_own(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= end for start, end in self.memory)

    def _check_copies(self, triples: list[tuple[int, int, int]], direction: str, by_kernel: bool) -> None:
        host = self.registered if by_kernel else self.mapped()
        for src, dst, nbytes in triples:
            inside, outside = (src, dst) if direction == "store" else (dst, src)
            assert self._is_own(inside, nbytes), f"{inside:#x}+{nbytes} is not the device's memory"
            fits = any(start <= outside and outside + nbytes <= end for start, end in host)
            assert fits, f"{outside:#x}+{nbytes} is not memory of the pool that this copy may touch"

    def run(self, most: int = 1 << 30) -> int:
        """Does up to `most` pieces of work that are due; how many were done."""
        with self.lock:
            done = 0
            moved = True
            while moved and done < most:
                moved = False
                # The newest first: what does not wait for earlier work runs ahead of it.
                for stream in reversed(self.streams):
                    while done < most and stream.waiting and self._due(stream.waiting[0]):
                        self._do(stream, stream.waiting.popleft())
                        done += 1
                        moved = True
            return done

    def _due(self, work: Work) -> bool:
        return work.after is None or work.after[0].done >= work.after[1]

    def _do(self, stream: Stream, work: Work) -> None:
        self.clock += 1
        if work.do is not None:
            work.do()
        if work.event is not None:
            work.event.at = self.clock
        stream.done += 1

    @property
    def idle(self) -> bool:
        return not any(stream.waiting for stream in self.streams)


class FakeDriver:
    """kvhost's driver interface over the fake device; its transfers are vLLM's real worker."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.calls: list[tuple[str, int]] = []
        # Registrations that succeed before all others are refused.
        self.allowed = 1 << 30
        self.keep: set[int] = set()
        self.main = threading.get_ident()
        self.made: list[bool] = []

    def enter(self) -> None:
        self.device.entered.add(threading.get_ident())

    def register(self, address: int, nbytes: int) -> None:
        assert threading.get_ident() != self.main, "registration blocks the engine's thread"
        assert threading.get_ident() in self.device.entered, "this thread has not chosen its device"
        assert address % 4096 == 0 and nbytes % 4096 == 0
        ctypes.memmove(address, address, nbytes)  # it is there, or this test dies
        assert not any(s < address + nbytes and address < e for s, e in self.device.registered)
        if self.allowed <= 0:
            raise DriverError(f"fakeHostRegister of {nbytes} bytes failed with code 2")
        self.allowed -= 1
        self.calls.append(("register", address))
        self.device.registered.append((address, address + nbytes))

    def unregister(self, address: int) -> None:
        if address in self.keep:
            raise DriverError("fakeHostUnregister failed with code 4")
        [span] = [span for span in self.device.registered if span[0] == address]
        ctypes.memmove(address, address, span[1] - span[0])  # still mapped
        self.calls.append(("unregister", address))
        self.device.registered.remove(span)

    def settle(self) -> None:
        self.device.check()
        self.device.run()

    def transfers(self, pages: DevicePages, *, pinned: bool) -> Any:
        self.made.append(pinned)
        return vllm_transfers(pages, pinned=pinned)


@contextmanager
def _current(device: FakeDevice, stream: Stream) -> Iterator[None]:
    device.current.stream = stream
    try:
        yield
    finally:
        device.current.stream = device.compute


def on_fake_device(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, *, kernels: bool = False) -> None:
    """Has vLLM's transfer worker find this device. `kernels`: small loads go by its copy kernel, which reads
    host memory itself."""
    platform = SimpleNamespace(
        Stream=device.stream,
        stream=lambda stream: _current(device, stream),
        current_stream=lambda: device.compute,
        is_xpu=lambda: False,
        is_rocm=lambda: False,
    )
    new_buffers = gpu_worker._new_descriptor_buffers

    def unpinned_buffers(count: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(gpu_worker, "PIN_MEMORY", False)
            return new_buffers(count)

    def refuse(address: int, nbytes: int) -> bool:
        raise AssertionError("vLLM registers memory that is not its own")

    def kernel(src: Any, dst: Any, sizes: Any, is_src_access_order_any: bool, bytes_per_chunk: int) -> None:
        device.swap(src, dst, sizes, is_src_access_order_any, by_kernel=True)

    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker, "ops", SimpleNamespace(swap_blocks_batch=device.swap))
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", True)
    monkeypatch.setattr(gpu_worker, "HAS_TRITON", kernels)
    monkeypatch.setattr(gpu_worker, "triton", SimpleNamespace(next_power_of_2=lambda n: 1 << n.bit_length()))
    monkeypatch.setattr(gpu_worker, "swap_blocks_batch", kernel)
    monkeypatch.setattr(gpu_worker, "host_register", refuse)
    monkeypatch.setattr(gpu_worker, "_new_descriptor_buffers", unpinned_buffers)
    monkeypatch.setattr(torch, "Event", lambda enable_timing=False: Event(device))
