"""OpenLake's daemon in local mode, and the client that its vLLM connector uses.

The daemon runs with its default configuration but for its addresses and a slab of the size that is needed.
As in its connector, a key's bytes are its block's pages, one address each, and the client copies them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import openlake_client  # type: ignore[import-not-found]

from benchmarks.peers.driver import Blocks, KVCache, Setting, Side, free_port, listens, serve

START_S = 30.0
# In front of every slot's bytes, as its connector counts them.
SLOT_HEADER_BYTES = 54

CONFIG = """
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "127.0.0.1:{rpc}"
kv_agents = ["127.0.0.1:{rpc}"]
s3_addr = "127.0.0.1:{s3}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1

[[credentials]]
access_key = "openlake"
secret_key = "openlake"

[[nodes]]
id = 0
rpc_addr = "127.0.0.1:{rpc}"
disk_count = 0

[kv_slab]
capacity_gb = {gib}
reserve_ttl_secs = 60
"""


class OpenLake(Side):
    about = "openlaked in local mode; put_batch, get_batch, batch_is_exist with an address for each page"

    def __init__(self, setting: Setting) -> None:
        cache = KVCache(setting)
        super().__init__(setting, cache)
        self._folder = tempfile.TemporaryDirectory(prefix="openlake-")
        rpc = free_port()
        config = Path(self._folder.name, "openlake.toml")
        config.write_text(CONFIG.format(rpc=rpc, s3=free_port(), gib=-(-setting.pool_bytes // (1 << 30))))
        self._log = Path(self._folder.name, "log")
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "openlake_client", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder.name,
            )
        try:
            self._attach(cache, rpc)
        except BaseException:
            self.close()
            raise

    def _attach(self, cache: KVCache, rpc: int) -> None:
        until = time.monotonic() + START_S
        while not listens(rpc):
            if self._server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"openlaked did not start: {self._log.read_text(errors='replace')[-500:]}")
            time.sleep(0.02)
        self._client = openlake_client.Client(device="local", client_id=2048)
        for pages in cache.layers:
            self._client.register_memory(pages.ctypes.data, pages.nbytes)
        self._client.attach(f"127.0.0.1:{rpc}", 0, SLOT_HEADER_BYTES + self.setting.block_bytes)
        self._bases = [pages.ctypes.data for pages in cache.layers]

    def servers(self) -> Sequence[int]:
        return [self._server.pid]

    def store(self, request: int, blocks: Blocks) -> None:
        self._all(self._client.put_batch(self._keys(request, len(blocks)), *self._places(blocks)))

    def find(self, request: int, count: int) -> None:
        found = self.lookup(request, count)
        if found != count:
            raise RuntimeError(f"{count} chunks are stored, {found} were found")

    def load(self, request: int, blocks: Blocks) -> None:
        self._all(self._client.get_batch(self._keys(request, len(blocks)), *self._places(blocks)))

    def forget(self) -> None:
        self._client.reset()

    def lookup(self, request: int, count: int) -> int:
        return int(self._client.batch_is_exist(self._keys(request, count)).count(1))

    def looked_up(self) -> None:
        """It holds nothing."""

    def close(self) -> None:
        maps = Path(f"/proc/{self._server.pid}/maps").read_text().split()
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        # It leaves its slab behind.
        for path in {part for part in maps if part.startswith("/dev/shm/")}:
            Path(path).unlink(missing_ok=True)
        self._folder.cleanup()

    def _places(self, blocks: Blocks) -> tuple[list[list[int]], list[list[int]]]:
        page = self.setting.page_bytes
        addresses = [[base + block * page for base in self._bases] for block in blocks.tolist()]
        return addresses, [[page] * len(self._bases)] * len(blocks)

    @staticmethod
    @lru_cache(32)
    def _keys(request: int, count: int) -> list[bytes]:
        """As long as its slots' headers want them: a hash of 32 bytes, model and ranks."""
        return [b"%032d%022d" % (number, request) for number in range(count)]

    @staticmethod
    def _all(results: Sequence[int]) -> None:
        failed = sum(value < 0 for value in results)
        if failed:
            raise RuntimeError(f"{failed} of {len(results)} chunks were refused")


if __name__ == "__main__":
    serve(OpenLake)
