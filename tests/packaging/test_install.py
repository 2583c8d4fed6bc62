"""`pip install .` into a bare environment: the daemon and the tools run, and nothing heavy comes along."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.user_cache import bare_environment, pip_install
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "proto", "server", "client", "connector")
GRPC = ("grpcio", "grpcio-channelz", "grpcio-health-checking", "grpcio-reflection")
# Beside the newest of everything, the oldest that pyproject.toml allows.
OLDEST = [*(f"{name}==1.72.1" for name in GRPC), "protobuf==6.30.0"]
DEPENDENCIES = {
    *GRPC,
    *(
        "click",
        "googleapis-common-protos",
        "markdown-it-py",
        "mdurl",
        "numpy",
        "prometheus-client",
        "protobuf",
        "pygments",
        "rich",
    ),
    "typing-extensions",
}

COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["newest", "oldest"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder. Built from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp(request.param)
    source = folder / "source"
    source.mkdir()
    copy_source(source)
    environment = folder / "environment"
    bare_environment(environment)
    pip_install(environment / "bin" / "python", str(source), *(OLDEST if request.param == "oldest" else ()))
    return environment


def copy_source(folder: Path) -> None:
    """What an installation is built from, without what was built here."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=ignore)
        else:
            shutil.copy2(ROOT / part, folder / part)


def run(environment: Path, program: str, *arguments: str) -> str:
    result = subprocess.run(
        [str(environment / "bin" / program), *arguments],
        env={"PATH": os.environ["PATH"]},
        cwd=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_brings_what_the_daemon_needs_and_nothing_more(installed: Path) -> None:
    code = "import json, importlib.metadata as m; print(json.dumps([d.name for d in m.distributions()]))"
    names = {name.lower().replace("_", "-") for name in json.loads(run(installed, "python", "-c", code))}

    assert "kvhost" in names
    assert names - {"kvhost"} <= DEPENDENCIES, f"new: {names - DEPENDENCIES}"


@pytest.mark.parametrize("program", ["kvhostd", "kvhostctl"])
def test_programs_run(installed: Path, program: str) -> None:
    assert f"Usage: {program}" in run(installed, program, "--help")


def test_daemon_serves_and_answers(installed: Path, tmp_path: Path) -> None:
    socket = tmp_path / "kvhostd.sock"
    command = [str(installed / "bin" / "kvhostd"), "--memory", "8MiB", "--socket", str(socket)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as daemon:
        try:
            wait_for((tmp_path / "kvhostd-admin.sock").exists, 20, "the admin socket")
            status = json.loads(run(installed, "kvhostctl", "--socket", str(socket), "--json", "status"))
            assert int(status["pid"]) == daemon.pid
        finally:
            daemon.terminate()
        assert daemon.wait(timeout=20) == 0


def test_carries_types_and_protocols(installed: Path) -> None:
    code = "import kvhost_proto, kvhost_client as c; print(kvhost_proto.__path__[0], c.__path__[0])"
    proto, client = (Path(path) for path in run(installed, "python", "-c", code).split())

    assert (client / "py.typed").exists()
    assert (proto / "py.typed").exists()
    assert {path.name for path in (proto / "v1").glob("*.proto")} == {
        path.name for path in (ROOT / "proto" / "kvhost_proto" / "v1").glob("*.proto")
    }
    assert (proto / "v1" / "admin_pb2.pyi").exists()


def test_is_a_vllm_plugin(installed: Path) -> None:
    code = """
import importlib.metadata as m
print(*[f"{e.name} {e.value}" for e in m.entry_points(group="vllm.general_plugins")])
"""
    assert run(installed, "python", "-c", code).strip() == "kvhost kvhost_connector:register"


@pytest.mark.skipif(COMPILER is None, reason="this machine has no C compiler")
def test_carries_the_compiled_copying(installed: Path) -> None:
    code = (
        "from kvhost_connector.native import library_path, load_native; load_native(); print(library_path())"
    )
    path = Path(run(installed, "python", "-c", code).strip())
    assert path.is_relative_to(installed)


def test_without_a_compiler_it_is_installed_without_the_compiled_copying(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    copy_source(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(source)],
        env={**os.environ, "CC": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvhost_connector/native.py" in names
    assert not [name for name in names if name.endswith(".so")]
