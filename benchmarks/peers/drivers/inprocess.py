"""vLLM's own manager for host memory, which lives in the engine's process: lookups only.

On the CPU platform vLLM has no copies for it: its worker and its region are for accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from benchmarks.peers.driver import Blocks, Setting, Side, serve


class InProcess(Side):
    about = "its LRU manager in this process, one call for each chunk as its scheduler half makes them"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._manager = CPUOffloadingManager(num_chunks=2 * setting.blocks)
        self._context = ReqContext(req_id="lookup")
        self._keys: list[OffloadKey] = []

    def servers(self) -> Sequence[int]:
        return []

    def store(self, request: int, blocks: Blocks) -> None:
        self._keys = [make_offload_key(b"%028d%04d" % (n, request), 0) for n in range(len(blocks))]
        self._manager.on_new_request(self._context)
        self._manager.prepare_store(self._keys, self._context)
        self._manager.complete_store(self._keys, self._context)

    def lookup(self, request: int, count: int) -> int:
        look, context = self._manager.lookup, self._context
        return sum(look(key, context) is LookupResult.HIT for key in self._keys[:count])

    def looked_up(self) -> None:
        """It holds nothing."""

    def find(self, request: int, count: int) -> None:
        raise NotImplementedError("it copies nothing on a CPU")

    def load(self, request: int, blocks: Blocks) -> None:
        raise NotImplementedError("it copies nothing on a CPU")

    def forget(self) -> None:
        """Nothing is stored twice."""

    def close(self) -> None:
        """It ends with this process."""


if __name__ == "__main__":
    serve(InProcess)
