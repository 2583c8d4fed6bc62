"""The comparison with other caches: choosing, skipping, merging, and a driver's answers. Installs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import benchmarks.peers.__main__ as command
from benchmarks.peers import environments
from benchmarks.peers.driver import KVCache, Setting
from benchmarks.peers.environments import PEERS, NotInstallable, check_import, environment, last_line
from benchmarks.peers.process import Driver, DriverFailed
from benchmarks.report import Report

LMCACHE = next(peer for peer in PEERS if peer.name == "lmcache")


def test_an_environment_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("this failed: pip install\nERROR: No matching distribution found for lmcache\n")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments, "bare_environment", lambda folder: None)
    monkeypatch.setattr(environments, "pip_install", refused)
    said: list[str] = []
    with pytest.raises(NotInstallable) as caught:
        environment(LMCACHE, said.append)
    assert str(caught.value) == (
        f"{LMCACHE.requirement} cannot be installed here: ERROR: No matching distribution found for lmcache"
    )
    assert said == [f"lmcache: installing {LMCACHE.requirement} (once)"]


def test_a_package_that_cannot_be_imported_is_skipped_with_the_reason() -> None:
    with pytest.raises(NotInstallable, match=r"cannot be imported here: ModuleNotFoundError: No module"):
        check_import(Path(sys.executable), replace(LMCACHE, imports="no_such_package"))


def test_a_skipped_peer_is_in_the_result_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> Path:
        raise NotInstallable("there is no network")

    monkeypatch.setattr(command, "environment", missing)
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "peers.json").read_text())
    assert kept["skipped"] == {peer.name: "there is no network" for peer in PEERS}
    assert kept["figures"] == {}


def test_figures_join_a_kept_result(tmp_path: Path) -> None:
    latest, added = tmp_path / "latest.json", tmp_path / "peers.json"
    first, second = Report(), Report()
    first.figure("lookup_8192_ms", 3.0)
    second.figure("load_vs_lmcache", [3.0, 4.0, 5.0])
    first.write(latest, {"cores": 2}, "2026-01-01")
    second.write(added, {"cores": 2, "form": "short"}, "2026-01-02")
    command.merge(added, latest)
    whole = json.loads(latest.read_text())
    assert whole["figures"] == {"lookup_8192_ms": 3.0, "load_vs_lmcache": 4.0}
    assert whole["date"] == "2026-01-01"
    assert whole["peers"]["date"] == "2026-01-02"


def test_a_wrong_name_is_one_line() -> None:
    result = CliRunner().invoke(command.main, ["--only", "lmcach"])
    assert result.exit_code == 1
    assert "there is no peer 'lmcach'" in result.output
    assert "lmcache" in result.output


def test_every_peer_has_a_driver_and_one_way_at_least() -> None:
    folder = Path(command.__file__).parent / "drivers"
    for peer in PEERS:
        assert (folder / f"{peer.driver}.py").exists()
        assert peer.copies or peer.lookups
        for variants in (peer.copies, peer.lookups):
            assert set(peer.chosen(variants, False)) <= set(peer.chosen(variants, True)) == set(variants)


def test_wrong_bytes_are_seen() -> None:
    cache = KVCache(Setting(layers=2, page_bytes=64, blocks=8, per_request=4))
    assert cache.wrong_blocks() == 0
    cache.layers[1][3, 5] ^= 1
    assert cache.wrong_blocks() == 1


def test_a_driver_that_ends_says_why() -> None:
    with pytest.raises(DriverFailed, match=r"no_such_driver ended: .*No module named"):
        Driver(Path(sys.executable), "no_such_driver", Setting(1, 64, 1, 1))


def test_the_last_line_says_what_was_wrong() -> None:
    assert last_line("a\nERROR: b\n\n[notice] a new release of pip\n") == "ERROR: b"
    assert last_line("") == "it gave no reason"


def test_help_names_every_peer() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--help"],
        capture_output=True, text=True, check=True, timeout=60,
        cwd=Path(command.__file__).parents[2],
    )  # fmt: skip
    for word in ("--full", "--only", "--output", "peers.json", *(peer.name for peer in PEERS)):
        assert word in result.stdout
