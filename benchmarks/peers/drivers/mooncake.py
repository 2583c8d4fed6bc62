"""Mooncake Store: a master, an owner process that has the memory, and a dummy client that reaches it.

The KV cache lies in memory that the client allocates and the owner maps, which is Mooncake's own way to
spare a copy: the owner copies each block's pages from there into its segment, and back.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from benchmarks.peers.driver import Blocks, KVCache, Setting, Side, free_port, listens, serve

_CUDART = Path(sysconfig.get_path("purelib"), "nvidia", "cuda_runtime", "lib")
# Even the build without CUDA is linked to its runtime library.
ctypes.CDLL(str(_CUDART / "libcudart.so.12"), ctypes.RTLD_GLOBAL)

import mooncake.store  # type: ignore[import-not-found] # noqa: E402

START_S = 30.0
_BINARIES = Path(mooncake.store.__file__).parent


class Mooncake(Side):
    about = (
        "master and owner over TCP on this host, dummy client; KV cache in the client's shared memory; "
        "batch_put_from_multi_buffers, batch_get_into_multi_buffers, batch_is_exist"
    )

    def __init__(self, setting: Setting) -> None:
        cache = KVCache(setting)
        super().__init__(setting, cache)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="mooncake-")
        try:
            self._attach(cache)
        except BaseException:
            self.close()
            raise

    def _attach(self, cache: KVCache) -> None:
        master, owner = free_port(), free_port()
        self._start(
            "mooncake_master", master,
            f"--rpc_port={master}", f"--metrics_port={free_port()}", "--enable_metric_reporting=false",
        )  # fmt: skip
        self._start(
            "mooncake_client", owner, "--host=127.0.0.1", f"--port={owner}", "--protocol=tcp",
            f"--master_server_address=127.0.0.1:{master}", "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={-(-self.setting.pool_bytes // (1 << 30))} GB",
        )  # fmt: skip
        self._client = mooncake.store.MooncakeDistributedStore()
        nbytes = sum(pages.nbytes for pages in cache.layers)
        if self._client.setup_dummy(nbytes + (64 << 20), 16 << 20, f"127.0.0.1:{owner}") != 0:
            raise RuntimeError("the dummy client found no owner")
        address = self._client.alloc_from_mem_pool(nbytes)
        if not address or self._client.register_buffer(address, nbytes) != 0:
            raise RuntimeError(f"the dummy client has no {nbytes} bytes")
        memory = np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)), dtype=np.uint8)
        views = list(memory.reshape(self.setting.layers, -1, self.setting.page_bytes))
        for view, pages in zip(views, cache.layers, strict=True):
            view[:] = pages
        cache.layers = views
        self._bases = [view.ctypes.data for view in views]

    def _start(self, name: str, port: int, *arguments: str) -> None:
        binary = _BINARIES / name
        binary.chmod(0o755)
        libraries = os.pathsep.join([str(_CUDART), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        log = Path(self._folder.name, name)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [binary, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder.name,
                env={**os.environ, "LD_LIBRARY_PATH": libraries},
            )
        self._processes.append(process)
        until = time.monotonic() + START_S
        while not listens(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.02)

    def servers(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def store(self, request: int, blocks: Blocks) -> None:
        keys = self._keys(request, len(blocks))
        self._all(self._client.batch_put_from_multi_buffers(keys, *self._places(blocks)))

    def find(self, request: int, count: int) -> None:
        found = self.lookup(request, count)
        if found != count:
            raise RuntimeError(f"{count} chunks are stored, {found} were found")

    def load(self, request: int, blocks: Blocks) -> None:
        keys = self._keys(request, len(blocks))
        self._all(self._client.batch_get_into_multi_buffers(keys, *self._places(blocks)))

    def forget(self) -> None:
        self._client.remove_all(True)

    def lookup(self, request: int, count: int) -> int:
        return int(self._client.batch_is_exist(self._keys(request, count)).count(1))

    def looked_up(self) -> None:
        """A lookup grants a lease, which ends by itself."""

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _places(self, blocks: Blocks) -> tuple[list[list[int]], list[list[int]]]:
        page = self.setting.page_bytes
        addresses = [[base + block * page for base in self._bases] for block in blocks.tolist()]
        return addresses, [[page] * len(self._bases)] * len(blocks)

    @staticmethod
    @lru_cache(32)
    def _keys(request: int, count: int) -> list[str]:
        return [f"{number:056d}{request:08d}" for number in range(count)]

    @staticmethod
    def _all(results: Sequence[int]) -> None:
        failed = sum(value < 0 for value in results)
        if failed:
            raise RuntimeError(f"{failed} of {len(results)} chunks were refused")


if __name__ == "__main__":
    serve(Mooncake)
