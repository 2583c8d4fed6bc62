"""Which weights an engine runs: the namespace's share of files, and the share of adapters in keys.

A copied model folder may miss; weights that changed must never hit (design section 6, A4, A9).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt", ".h5", ".msgpack"}
# Configs and code that decide how weights are read; tokenizers decide nothing about KV.
_CONFIG_SUFFIXES = {".json", ".py", ".yaml", ".yml"}
_NOT_CONFIG = ("tokenizer", "vocab", "special_tokens", "added_tokens", "merges", "generation_config")


def private() -> dict[str, str]:
    """An identity that no other engine has: what cannot be told apart must not be shared."""
    return {"private": secrets.token_hex(16)}


def file_identities(paths: Iterable[Path], *, with_times: bool) -> list[list[Any]]:
    """(name, size in bytes, mtime in ns) of each file, sorted; without times where the operator names the
    version instead."""
    found = []
    for path in sorted(paths):
        status = path.stat()
        found.append([path.name, status.st_size, *([status.st_mtime_ns] if with_times else [])])
    return found


def _config_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _CONFIG_SUFFIXES and path.is_file() and not path.name.startswith(_NOT_CONFIG):
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def model_identity(
    model: str, *, revision: str | None, commit: str | None, weights_version: str
) -> dict[str, Any]:
    """What tells this model's weights from all others, for the namespace's digest.

    A local folder goes by the digest of its configs and the identity of its weight files, wherever it
    stands; a model of the hub by its name and the commit that its revision resolved to.
    """
    path = Path(model)
    if path.is_dir():
        files = [entry for entry in path.iterdir() if entry.suffix in _WEIGHT_SUFFIXES and entry.is_file()]
        return {
            "config": _config_digest(path),
            "files": file_identities(files, with_times=not weights_version),
        }
    if path.is_file():
        return {"files": file_identities([path], with_times=not weights_version)}
    resolved = commit or _cached_commit(model, revision)
    if resolved is not None:
        return {"id": model, "commit": resolved}
    if weights_version:
        return {"id": model, "revision": revision}
    return {"id": model, **private()}


def _cached_commit(model: str, revision: str | None) -> str | None:
    """The commit of a hub model as huggingface_hub has it on this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError, OSError):
        return None
    if not isinstance(found, str):
        return None
    parts = Path(found).parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


class AdapterIdentities:
    """Digests of LoRA adapters, which go into the keys of their requests.

    vLLM's block hash holds an adapter's name and path only: new weights at the old path would hit. The files
    are looked at when an adapter is first used, as the engine loads it then, and again when a request asks
    to load it in place.
    """

    def __init__(self, lora_dtype: str = "") -> None:
        self._lora_dtype = lora_dtype
        self._known: dict[tuple[int, str], bytes] = {}

    def of(self, request: Any) -> bytes:
        """32 bytes that stand for the adapter of a request; empty when it has none."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return b""
        name = (int(adapter.lora_int_id), str(adapter.lora_path))
        if name not in self._known or getattr(adapter, "load_inplace", False):
            self._known[name] = self._look(str(adapter.lora_path))
        return self._known[name]

    def _look(self, path: str) -> bytes:
        folder = Path(path)
        identity: Any
        try:
            files = [Path(entry.path) for entry in os.scandir(folder) if entry.is_file()]
            identity = file_identities(files, with_times=True)
        except OSError:  # not a folder of this machine: nothing tells its weights apart
            identity = private()
        return hashlib.sha256(repr((self._lora_dtype, identity)).encode()).digest()


def adapter_key(key: bytes, identity: bytes) -> bytes:
    """The chunk key of a request with this adapter: as long as `key`, with the same group at its end."""
    if not identity:
        return key
    block_hash, group = key[:-4], key[-4:]
    return hashlib.shake_256(identity + block_hash).digest(len(block_hash)) + group
