"""vLLM's own in-process cache, made to run on the CPU platform: the other side of the hook benchmark.

Its manager, policy and scheduler half are vLLM's, unchanged; vLLM refuses only to make a worker where there
is no GPU. The worker here copies at once, on the engine's thread: it costs the hooks nothing.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def kv_transfer(host_bytes: int) -> dict[str, Any]:
    """Fields of KVTransferConfig for an engine with vLLM's own LRU manager and so much host memory."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "InProcessSpec",
            "spec_module_path": "benchmarks.baseline",
            "cpu_bytes_to_use": host_bytes,
        },
    }


class InProcessSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """CPUOffloadingSpec with a worker for KV caches in host memory."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.num_chunks)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between two places in host memory, one block a chunk."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._device = [
            entry.tensor.numpy().view(np.uint8).reshape(len(entry.tensor), -1) for entry in kv_caches.tensors
        ]
        self._host = [np.zeros((chunks, device.shape[1]), np.uint8) for device in self._device]
        self._layers = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy(job_id, dst_spec, src_spec, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: a copy is over when it was submitted."""

    def _copy(self, job_id: int, device_spec: Any, host_spec: Any, *, store: bool) -> None:
        started = time.monotonic()
        blocks, chunks = np.asarray(device_spec.block_ids), np.asarray(host_spec.block_ids)
        moved = at = 0
        for size, layers in zip(device_spec.group_sizes, self._layers, strict=True):
            ours, theirs = blocks[at : at + size], chunks[at : at + size]
            at += size
            for layer in layers:
                device, host = self._device[layer], self._host[layer]
                if store:
                    host[theirs] = device[ours]
                else:
                    device[ours] = host[theirs]
                moved += size * device.shape[1]
        self._finished.append(TransferResult(job_id, True, moved, time.monotonic() - started))
