"""LMCache's multiprocess server and the two adapters that its vLLM connector is made of.

The server runs with its defaults but for what the comparison needs: a chunk is a block (`--chunk-size 16`,
or the default of 256 tokens where the variant says so), room for all that is stored, shared memory switched
on for the transfer, telemetry off. `Setting.variant` is `TRANSPORT-MODE[-default]`: zmq or grpc; `engine`,
where the worker copies (what LMCache chooses by itself on this platform), or `server`, where its server does.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (  # type: ignore[import-not-found]
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)

from benchmarks.peers.driver import (
    BLOCK_TOKENS,
    Blocks,
    KVCache,
    Setting,
    Side,
    free_port,
    listens,
    serve,
)

START_S = 90.0
CALL_S = 60.0
VISIBLE_S = 10.0
MODEL = "benchmark"
DEFAULT_CHUNK_TOKENS = 256


class LMCache(Side):
    def __init__(self, setting: Setting) -> None:
        cache = KVCache(setting)
        super().__init__(setting, cache)
        self._layers = cache
        transport, mode, *rest = setting.variant.split("-")
        self._chunk_tokens = DEFAULT_CHUNK_TOKENS if rest else BLOCK_TOKENS
        driven = {"engine": "engine_driven", "server": "lmcache_driven"}[mode]
        self.about = (
            f"MP server over {transport}, {'worker' if mode == 'engine' else 'server'} copies, chunks of "
            f"{self._chunk_tokens} tokens; store, retrieve and lookup requests of its vLLM adapters"
        )
        port = free_port()
        shm = f"kvhost-bench-{secrets.token_hex(4)}"
        self._log = tempfile.NamedTemporaryFile(prefix="lmcache-", suffix=".log", delete=False)  # noqa: SIM115
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--transport", transport]
        command += ["--port", str(port), "--chunk-size", str(self._chunk_tokens)]
        command += ["--l1-size-gb", str(setting.pool_bytes / (1 << 30)), "--eviction-policy", "LRU"]
        command += ["--supported-transfer-mode", driven, "--disable-observability"]
        command += ["--shm-name", shm] if mode == "engine" else []
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env={**os.environ}
        )
        url = f"{'tcp' if transport == 'zmq' else 'grpc'}://localhost:{port}"
        try:
            self._attach(url, port, driven)
        except BaseException:
            self.close()
            raise

    def _attach(self, url: str, port: int, driven: str) -> None:
        until = time.monotonic() + START_S
        while not listens(port):
            if self._server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"LMCache's server did not start:\n{self._tail()}")
            time.sleep(0.05)
        one = ParallelStrategy(
            mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
        )
        config = {"lmcache.mp.mq_timeout": CALL_S, "lmcache.mp.nonblocking_lookup_status": False}
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._scheduler = LMCacheMPSchedulerAdapter(
            [url], context, MODEL, BLOCK_TOKENS, one, extra_config=config
        )
        self._worker = LMCacheMPWorkerAdapter(
            url, context, MODEL, BLOCK_TOKENS, one,
            extra_config={**config, "lmcache.mp.mp_transfer_mode": driven},
        )  # fmt: skip
        heads = 8 if self.setting.page_bytes >= 1 << 16 else 1
        width = self.setting.page_bytes // (2 * heads * BLOCK_TOKENS)
        # As vLLM's layout LBHNC: K and V of a head's token side by side.
        tensors = {
            f"layer.{n}": torch.from_numpy(pages).view(torch.bfloat16).view(-1, heads, BLOCK_TOKENS, width)
            for n, pages in enumerate(self._layers.layers)
        }
        self._worker.register_kv_caches(tensors, layout_hints={"kv_layout": "HND"})
        # The server's way moves the tensors into shared memory.
        self._layers.layers = [
            tensor.view(-1).view(torch.uint8).numpy().reshape(-1, self.setting.page_bytes)
            for tensor in tensors.values()
        ]

    def servers(self) -> Sequence[int]:
        return [self._server.pid]

    def store(self, request: int, blocks: Blocks) -> None:
        name = f"store-{request}"
        self._worker.submit_store_request(
            name, self._op(request, blocks), self._worker.create_recorded_event()
        )
        self._wait_stored(name)
        self._scheduler.end_session(name)

    def find(self, request: int, count: int) -> None:
        # Where its server copies, a stored chunk may come into sight some time after the store has ended.
        until = time.monotonic() + VISIBLE_S
        found = 0
        while found != count * BLOCK_TOKENS and time.monotonic() < until:
            found = self.lookup(request, count) * BLOCK_TOKENS
            if found != count * BLOCK_TOKENS:
                self.looked_up()
                time.sleep(0.01)
        if found != count * BLOCK_TOKENS:
            raise RuntimeError(
                f"{count * BLOCK_TOKENS} tokens are stored, {found} were found\n{self._tail()}"
            )

    def load(self, request: int, blocks: Blocks) -> None:
        name = self._name
        self._worker.submit_retrieve_request(
            name, self._op(request, blocks), self._worker.create_recorded_event()
        )
        until = time.monotonic() + CALL_S
        while name not in (self._worker.get_finished(set())[1] or ()):
            if time.monotonic() > until:
                raise TimeoutError(f"a load took more than {CALL_S:.0f} s\n{self._tail()}")
            time.sleep(0)
        if self._worker.get_block_ids_with_load_errors():
            raise RuntimeError(f"a load failed\n{self._tail()}")
        self._scheduler.cleanup_lookup_result(name)
        self._scheduler.end_session(name)

    def forget(self) -> None:
        self._scheduler.reset_cache()

    def lookup(self, request: int, count: int) -> int:
        self._name = f"look-{secrets.token_hex(8)}"
        self._looked = (request, count)
        return self._look_up(self._name, request, count) // BLOCK_TOKENS

    def looked_up(self) -> None:
        request, count = self._looked
        tokens = self._tokens(request, count)
        self._scheduler.free_lookup_locks(tokens, 0, len(tokens), self._name)
        self._scheduler.cleanup_lookup_result(self._name)
        self._scheduler.end_session(self._name)

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()
        os.unlink(self._log.name)

    def _look_up(self, name: str, request: int, count: int) -> int:
        self._scheduler.maybe_submit_lookup_request(name, self._tokens(request, count))
        until = time.monotonic() + CALL_S
        while (found := self._scheduler.check_lookup_result(name)) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"a lookup took more than {CALL_S:.0f} s\n{self._tail()}")
            time.sleep(0)
        return int(found)

    def _wait_stored(self, name: str) -> None:
        until = time.monotonic() + CALL_S
        while name not in (self._worker.get_finished({name})[0] or ()):
            if time.monotonic() > until:
                raise TimeoutError(f"a store took more than {CALL_S:.0f} s\n{self._tail()}")
            time.sleep(0)

    def _op(self, request: int, blocks: Blocks) -> LoadStoreOp:
        tokens = self._tokens(request, len(blocks))
        return LoadStoreOp(tokens, [blocks.tolist()], start=0, end=len(tokens))

    @staticmethod
    @lru_cache(16)
    def _tokens(request: int, count: int) -> list[int]:
        """A prompt of so many blocks; no two requests have a first token in common."""
        return [request, *range(count * BLOCK_TOKENS - 1)]

    def _tail(self) -> str:
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-15:])


if __name__ == "__main__":
    serve(LMCache)
