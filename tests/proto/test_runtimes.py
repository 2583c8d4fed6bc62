"""Generated modules load, and mean the same bytes, under the protobuf runtimes that engines bring."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.user_cache import small_environment
from tests.proto import messages

ROOT = Path(__file__).resolve().parents[2]
# One row: requirements, and how the runtime's version must begin.
RUNTIMES = {
    "oldest": (("protobuf==6.30.0", "grpcio==1.72.1"), "6.30."),
    "last 6": (("protobuf>=6.30,<7", "grpcio"), "6."),
    "7": (("protobuf>=7,<8", "grpcio"), "7."),
}

# The environments are made at first use.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> tuple[Path, str]:
    requirements, version = RUNTIMES[request.param]
    name = f"protobuf-{request.param.replace(' ', '-')}"
    return small_environment(name, *requirements), version


def run(python: Path, *arguments: str) -> str:
    """Runs with nothing on the path but the runtime and the generated modules; warnings are errors."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "proto")}
    result = subprocess.run(
        [str(python), "-P", "-W", "error", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_message_survives_and_means_the_same_bytes(runtime: tuple[Path, str]) -> None:
    python, version = runtime
    found: dict[str, Any] = json.loads(run(python, str(Path(messages.__file__))))

    assert found["protobuf"].startswith(version)
    here = {
        descriptor.full_name: messages.filled(descriptor).SerializeToString(deterministic=True).hex()
        for descriptor in messages.descriptors()
    }
    assert found["messages"] == here
    assert len(here) > 50


def test_service_modules_load(runtime: tuple[Path, str]) -> None:
    python, _ = runtime
    code = "from kvhost_proto.v1 import admin_pb2_grpc, cache_pb2_grpc; print(cache_pb2_grpc.CacheStub)"
    assert "CacheStub" in run(python, "-c", code)
