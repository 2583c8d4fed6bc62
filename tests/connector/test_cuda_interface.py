"""What kvhost relies on of vLLM's transfer code, in the real classes: upstream changes fail here first."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu import gpu_worker, swap_blocks_triton
from vllm.v1.kv_offload.cpu.gpu_worker import (
    CPUOffloadingWorker,
    SingleDirectionOffloadingHandler,
    compute_sub_block_ptrs,
    pin_mmap_region,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvhost_connector.device.pages import CopyPlan, DevicePages
from kvhost_connector.device.region import (
    RowSpec,
    Window,
    blocks_of,
    canonical_caches,
    rows_at,
    vllm_transfers,
)
from tests.connector.caches import layered, two_groups
from tests.connector.device import FakeDevice, on_device, on_fake_device


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def copy_plan(blocks: Sequence[int], rows: Sequence[int], sizes: tuple[int, ...]) -> CopyPlan:
    """What vLLM's worker is given of a plan."""
    numbers = [np.array(found, dtype=np.int64) for found in (blocks, rows, [], [])]
    return CopyPlan(numbers[0], numbers[1], sizes, numbers[2], numbers[3], 0)


# The worker and its constructor.


def test_the_worker_is_made_of_caches_and_a_region() -> None:
    assert parameters(CPUOffloadingWorker)[:4] == [
        "kv_caches",
        "blocks_per_chunk",
        "num_cpu_chunks",
        "mmap_region",
    ]
    assert issubclass(CPUOffloadingWorker, OffloadingWorker)
    assert parameters(CPUOffloadingWorker.submit_store)[:3] == ["job_id", "src_spec", "dst_spec"]
    assert parameters(CPUOffloadingWorker.submit_load)[:3] == ["job_id", "src_spec", "dst_spec"]
    assert parameters(CPUOffloadingWorker.wait) == ["job_ids"]
    assert not parameters(CPUOffloadingWorker.get_finished)
    assert not parameters(CPUOffloadingWorker.shutdown)


def test_caches_and_results_have_the_fields_that_are_used() -> None:
    assert {field.name for field in dataclasses.fields(CanonicalKVCaches)} >= {"tensors", "group_data_refs"}
    assert {field.name for field in dataclasses.fields(CanonicalKVCacheTensor)} >= {
        "tensor",
        "page_size_bytes",
    }
    assert {field.name for field in dataclasses.fields(CanonicalKVCacheRef)} >= {
        "tensor_idx",
        "page_size_bytes",
    }
    assert {field.name for field in dataclasses.fields(TransferResult)} >= {
        "job_id",
        "success",
        "transfer_size",
        "transfer_time",
    }
    spec = GPULoadStoreSpec([1, 2], group_sizes=[2], block_indices=[0])
    assert list(spec.block_ids) == [1, 2]
    assert issubclass(GPULoadStoreSpec, BlockIDsLoadStoreSpec)


# The region.


def test_our_region_has_what_the_worker_asks_of_vllms() -> None:
    """Whatever the worker and its registration name of a region is there, with the same parameters."""
    source = inspect.getsource(CPUOffloadingWorker) + inspect.getsource(pin_mmap_region)
    asked = set(re.findall(r"region\.(\w+)", source))
    assert asked >= {"_base", "_row_stride", "total_size_bytes", "is_pinned", "create_next_worker_view"}
    window = Window([(0, 64)], pinned=True)
    assert [name for name in asked if not hasattr(window, name)] == []
    for name in ("create_next_worker_view", "create_next_canonical_view", "cleanup"):
        assert parameters(getattr(Window, name)) == parameters(getattr(SharedOffloadRegion, name))


def test_vllm_registers_nothing_of_ours_and_its_verdict_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("registered by vLLM")

    monkeypatch.setattr(gpu_worker, "host_register", refuse)
    for pinned in (True, False):
        window = Window([], pinned=pinned)
        pin_mmap_region(window)
        assert window.is_pinned is pinned
        assert window.pinned_addresses == []


@pytest.mark.parametrize("size", [64, (64 << 10) + 64, 1 << 20, 8 << 20, 1 << 30])
def test_a_row_is_where_it_says(size: int) -> None:
    """vLLM's own arithmetic makes the address of a row that was the address before, in pages of any size."""
    window = Window([(0, size), (size, 32)], pinned=False)
    views = [window.create_next_worker_view(size), window.create_next_worker_view(32)]
    addresses = (0x7F12_3456_7000, 0x5555_0000_1001, 4096)
    rows = rows_at(copy_plan((1, 2, 3), addresses, (3,)))
    assert rows.block_ids.dtype == np.int64
    for view, offset in zip(views, (0, size), strict=True):
        found = np.empty(3, dtype=np.uint64)
        compute_sub_block_ptrs(rows.block_ids, 1, found, view)
        assert [int(address) for address in found] == [address + offset for address in addresses]
        assert view.dtype == torch.int8
        assert view.device.type == "cpu"
    with pytest.raises(ValueError, match="asks for a view of 48 bytes a block where 64 are due"):
        Window([(0, 64)], pinned=False).create_next_worker_view(48)


def test_the_device_side_keeps_blocks_and_groups() -> None:
    made = blocks_of(copy_plan((5, 6, 7), (0, 0, 0), (1, 2)))
    assert list(made.block_ids) == [5, 6, 7]
    assert list(made.group_sizes) == [1, 2]
    assert isinstance(RowSpec(np.ones(1, dtype=np.int64)), BlockIDsLoadStoreSpec)


# The handler's order of things, which ours is built on.


def test_transfers_of_both_directions_wait_for_the_engines_stream_and_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(eager=False)
    on_fake_device(monkeypatch, device)
    cache = layered(2)
    for tensor in cache.tensors:
        device.own(tensor)
    pool = np.zeros(1 << 16, dtype=np.uint8)
    start = pool.ctypes.data
    device.mapped = lambda: [(start, start + pool.size)]
    worker = vllm_transfers(DevicePages.of(on_device(cache.canonical)), pinned=False)
    plan = copy_plan((3,), (start,), (1,))
    for job in (1, 2):
        assert worker.submit_store(job, blocks_of(plan), rows_at(plan))
    for job in (3, 4):
        assert worker.submit_load(job, rows_at(plan), blocks_of(plan))
    streams = [name for name, what in device.log if "pieces" in what]
    assert len(set(streams)) == 4
    for number, stream in enumerate(streams):
        before = [what for name, what in device.log if name == stream]
        assert before[0] == "waits for compute"
        if number % 2:
            assert before[1] == f"waits for an event of {streams[number - 1]}"
    assert worker.get_finished() == []
    device.run()
    done = worker.get_finished()
    assert sorted(result.job_id for result in done) == [1, 2, 3, 4]
    assert all(result.success and result.transfer_size == 128 for result in done)
    worker.shutdown()


def test_its_handlers_have_the_parameters_that_decide_which_copy_is_used() -> None:
    assert "host_memory_is_pinned" in parameters(SingleDirectionOffloadingHandler)
    choose = gpu_worker._select_swap_blocks_fn
    assert choose([[]], gpu_to_cpu=False, host_memory_is_pinned=False) is gpu_worker.ops.swap_blocks_batch


def test_the_copies_themselves_are_called_as_the_fake_device_takes_them() -> None:
    """vLLM's DMA copy, and its kernel for small pages."""
    assert parameters(FakeDevice.swap)[2:4] == ["sizes", "is_src_access_order_any"]
    assert parameters(_custom_ops.swap_blocks_batch)[2:] == ["sizes", "is_src_access_order_any"]
    assert parameters(swap_blocks_triton.swap_blocks_batch)[2:] == [
        *("sizes", "is_src_access_order_any", "bytes_per_chunk")
    ]


# What vLLM's half hands over: layouts, groups, eight-bit floats.


def native_caches(config: KVCacheConfig, caches: dict[str, Any]) -> Any:
    """CanonicalKVCaches as vLLM's real worker half makes them."""
    found: list[Any] = []
    half = object.__new__(OffloadingConnectorWorker)
    half.kv_cache_config = config
    half.vllm_config = SimpleNamespace()
    half.spec = SimpleNamespace(get_worker=lambda made: found.append(made) or SimpleNamespace())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker.derive_canonical_mappings",
            lambda *_: {},
        )
        half.register_kv_caches(caches)
    return found[0]


def engine_caches(layout: str, dtype: Any, groups: int = 1, layers: int = 2, blocks: int = 6) -> Any:
    """(config, tensors) as the model runner makes them: one allocation, a view for each layer."""
    fields: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": dtype}
    specs = [FullAttentionSpec(**fields), SlidingWindowSpec(**fields, sliding_window=8)][:groups]
    page = specs[0].page_size_bytes
    names = [[f"g{g}.{n}" for n in range(layers)] for g in range(groups)]
    outermost = layout.startswith("B")
    backing = torch.zeros(blocks * layers * page, dtype=torch.int8)
    layer_stride, block_stride = (page, layers * page) if outermost else (blocks * page, page)
    element = torch.empty(0, dtype=dtype).element_size()
    caches = {}
    for group in names:  # groups overlay each other
        for number, name in enumerate(group):
            caches[name] = torch.as_strided(
                backing.view(dtype),
                (blocks, 2, 4, page // element // 8),
                (block_stride // element, page // element // 2, page // element // 8, 1),
                number * layer_stride // element,
            )
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=backing.numel(), layers=group, layer_stride=layer_stride, block_stride=block_stride
            )
            for group in names
        ],
        kv_cache_groups=[KVCacheGroupSpec(group, spec) for group, spec in zip(names, specs, strict=True)],
        kv_cache_layout=layout,
        hash_block_size=4,
    )
    return config, caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("layout", "pieces"), [("LBHNC", 2), ("BLHNC", 1)])
def test_what_vllm_hands_over_is_copied_in_as_few_pieces_as_it_lies(
    layout: str, pieces: int, dtype: Any
) -> None:
    for groups in (1, 2):
        config, caches = engine_caches(layout, dtype, groups)
        made = native_caches(config, caches)
        pages = DevicePages.of(on_device(made))
        assert len(pages.groups) == groups
        assert pages.blocks == 6
        page = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        for group in pages.groups:
            assert group.block_bytes == 2 * page
            assert [fragment.bytes for fragment in group.fragments] == [2 * page // pieces] * pieces
        # ... and handed on to vLLM's worker in the form that it takes.
        again = canonical_caches(pages)
        assert [len(refs) for refs in again.group_data_refs] == [pieces] * groups
        for entry in again.tensors:
            rows = entry.tensor.view(torch.int8).view((-1, entry.page_size_bytes))
            assert rows.shape == (6, entry.page_size_bytes)


def test_groups_share_no_descriptor() -> None:
    made = canonical_caches(DevicePages.of(on_device(two_groups().canonical)))
    numbers = [ref.tensor_idx for refs in made.group_data_refs for ref in refs]
    assert numbers == list(range(len(made.tensors)))


# The device's memory.


def test_transfers_hold_no_device_memory() -> None:
    """Descriptors are host tensors; nothing in vLLM's transfer code allocates on the device but its kernel's
    copies of them."""
    for made in gpu_worker._new_descriptor_buffers(4):
        assert made.device.type == "cpu"
    assert "torch.zeros" not in inspect.getsource(SingleDirectionOffloadingHandler)
    assert "torch.empty" not in inspect.getsource(SingleDirectionOffloadingHandler)
