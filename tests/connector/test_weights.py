"""Which weights an engine runs: copies may miss, changed weights must never hit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhost_connector.weights import AdapterIdentities, adapter_key, model_identity
from tests.support.patterns import pat


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(pat("one", 0, 100))
    (folder / "model-2.safetensors").write_bytes(pat("two", 0, 100))
    return folder


def identity(folder: Path, version: str = "") -> dict[str, Any]:
    return model_identity(str(folder), revision=None, commit=None, weights_version=version)


def touch_later(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def test_the_same_folder_is_the_same_model(model: Path) -> None:
    assert identity(model) == identity(model)


def test_weights_written_over_the_old_files_are_another_model(model: Path) -> None:
    before = identity(model)
    touch_later(model / "model-2.safetensors")
    assert identity(model) != before


@pytest.mark.parametrize("change", ["size", "name", "more", "config"])
def test_every_difference_of_files_counts(model: Path, change: str) -> None:
    before = identity(model)
    if change == "size":
        with (model / "model-1.safetensors").open("ab") as file:
            file.write(b"x")
    elif change == "name":
        (model / "model-1.safetensors").rename(model / "model-3.safetensors")
    elif change == "more":
        (model / "adapter.bin").write_bytes(b"x")
    else:
        (model / "config.json").write_text('{"layers": 3}')
    assert identity(model) != before


def test_tokenizers_do_not_count(model: Path) -> None:
    before = identity(model)
    (model / "tokenizer.json").write_text('{"other": 1}')
    assert identity(model) == before


def test_a_named_version_stands_in_for_times_so_that_copies_share(model: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(model, copied, copy_function=shutil.copyfile)
    touch_later(copied / "model-1.safetensors")
    assert identity(model) != identity(copied)
    assert identity(model, "v1") == identity(copied, "v1")


def test_a_single_file_goes_by_its_own_identity(model: Path) -> None:
    file = model / "model-1.safetensors"
    before = identity(file)
    touch_later(file)
    assert before != identity(file)


def test_a_hub_model_goes_by_its_commit() -> None:
    one = model_identity("org/model", revision="main", commit="abc", weights_version="")
    other = model_identity("org/model", revision="main", commit="abd", weights_version="")
    assert one != other
    assert one == {"id": "org/model", "commit": "abc"}


def test_a_model_whose_weights_cannot_be_told_apart_is_shared_with_nobody() -> None:
    def unknown(version: str = "") -> dict[str, Any]:
        return model_identity("org/not-there", revision="x", commit=None, weights_version=version)

    assert unknown() != unknown()
    assert unknown("v1") == unknown("v1")


# Adapters.


def request(path: str | None, number: int = 1, *, inplace: bool = False) -> SimpleNamespace:
    adapter = path and SimpleNamespace(lora_int_id=number, lora_path=path, load_inplace=inplace)
    return SimpleNamespace(lora_request=adapter or None)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(pat("adapter", 0, 64))
    return folder


def test_a_request_without_adapter_keeps_its_keys() -> None:
    assert AdapterIdentities().of(request(None)) == b""
    assert adapter_key(b"h" * 32 + b"\0\0\0\1", b"") == b"h" * 32 + b"\0\0\0\1"


def test_an_adapter_changes_keys_but_not_their_length_or_group(adapter: Path) -> None:
    identity_of = AdapterIdentities().of(request(str(adapter)))
    key = adapter_key(b"h" * 32 + b"\0\0\0\1", identity_of)
    assert len(key) == 36
    assert key[-4:] == b"\0\0\0\1"
    assert key[:32] != b"h" * 32


def test_new_adapter_files_at_the_old_path_have_other_keys_in_a_new_engine(adapter: Path) -> None:
    before = AdapterIdentities().of(request(str(adapter)))
    touch_later(adapter / "adapter_model.safetensors")
    assert AdapterIdentities().of(request(str(adapter))) != before


def test_a_running_engine_keeps_the_identity_of_what_it_has_loaded(adapter: Path) -> None:
    identities = AdapterIdentities()
    before = identities.of(request(str(adapter)))
    touch_later(adapter / "adapter_model.safetensors")
    assert identities.of(request(str(adapter))) == before
    assert identities.of(request(str(adapter), inplace=True)) != before
    assert identities.of(request(str(adapter), number=2)) != before


def test_an_adapter_that_is_no_folder_here_is_shared_with_nobody() -> None:
    assert AdapterIdentities().of(request("org/x")) != AdapterIdentities().of(request("org/x"))
