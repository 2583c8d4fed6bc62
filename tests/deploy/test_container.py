"""deploy/container: the image's steps carried out without an engine, and what compose is told."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import ComposeSpecification

from kvhost_client.paths import DEFAULT_SOCKET
from kvhost_server.units import parse_size
from scripts.user_cache import made_once
from tests.client.engine import Engine, keys
from tests.deploy.dockerfile import Image, build, lend_network, make_base, sent, steps
from tests.packaging.test_install import PARTS
from tests.support.options import check_transfer
from tests.support.processes import children
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "container"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    base = made_once("debian-bookworm-minbase", 1, lambda folder: make_base(folder / "root")) / "root"
    folder = tmp_path_factory.mktemp("image")
    lent = folder / "lent"
    subprocess.run(["cp", "-a", str(base), str(lent)], check=True)
    lend_network(lent)
    return build(FOLDER / "Dockerfile", ROOT, lent, folder)


@pytest.fixture
def container(image: Image) -> Iterator[subprocess.Popen[bytes]]:
    """The image run as `docker run -e KVHOST_MEMORY=8MiB` would."""
    image.environment["KVHOST_MEMORY"] = "8MiB"
    process = subprocess.Popen(image.command(image.entrypoint), stdin=subprocess.DEVNULL)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait(30)


def run(image: Image, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(image.command(arguments), capture_output=True, text=True, check=False)


def test_it_serves_as_nobody_in_particular(image: Image, container: subprocess.Popen[bytes]) -> None:
    """Started by its entry point, healthy by its health check, used by an engine that shares only the folder
    of the sockets, and ended by the signal that engines send."""
    wait_for(lambda: run(image, *image.healthcheck).returncode == 0, 60, "the health check to pass")
    status = json.loads(run(image, "kvhostctl", "status", "--json").stdout)
    pid = int(status["pid"])
    owner = os.stat(f"/proc/{pid}")
    assert (owner.st_uid, owner.st_gid) == (10001, 10001)
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert not re.search(r"libcuda|libtorch|libtpu|jaxlib|numpy", mapped)
    folder = image.root / "run" / "kvhost"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o751
    # A volume, seen from another container: the same folder under another path, and not even /proc in common.
    with Engine(str(image.root / DEFAULT_SOCKET.lstrip("/"))) as engine:
        names = keys("chain", 3)
        engine.store(names)
        assert engine.wrong_bytes(names) == []
    os.kill(pid, getattr(signal, image.stop_signal))
    assert container.wait(30) == 0
    assert list(folder.glob("*.sock")) == []
    assert children(os.getpid(), "kvhostd") == []


def test_the_health_check_fails_while_nobody_serves(image: Image) -> None:
    result = run(image, *image.healthcheck)
    assert result.returncode == 69
    assert DEFAULT_SOCKET.removesuffix(".sock") in result.stderr


def test_nothing_heavy_is_in_it(image: Image) -> None:
    packages = {path.name.lower() for path in image.root.glob("opt/kvhost/lib/python3*/site-packages/*")}
    assert packages & {"torch", "vllm", "jax", "jaxlib", "nvidia", "pip", "setuptools"} == set()
    size = subprocess.run(
        ["du", "-sm", str(image.root / "opt")], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert int(size) < 150


def test_the_daemon_is_not_root_and_time_is_given_to_populate() -> None:
    found = {step.word: step.rest for step in steps(FOLDER / "Dockerfile")}
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", found["USER"])
    assert "--start-period=30m" in found["HEALTHCHECK"]
    assert found["HEALTHCHECK"].endswith('CMD ["kvhostctl", "health"]')


def test_what_is_sent_is_what_is_built_from() -> None:
    tops = {path.parts[0] for path in sent(ROOT)}
    assert tops == set(PARTS)


# Compose. There is no engine here to start it: what it says is checked against the specification, and its
# options against the programs they are for.


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (FOLDER / "compose.yaml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_compose_is_as_the_specification_says(compose: dict[str, Any]) -> None:
    ComposeSpecification.model_validate(compose)
    assert set(compose["services"]) == {"kvhostd", "vllm", "prometheus", "grafana"}


def test_files_that_compose_names_are_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" in service:
            context = FOLDER / service["build"]["context"]
            assert context.resolve() == ROOT
            assert (context / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (FOLDER / source).is_dir() if source.startswith(".") else source in compose["volumes"]


def test_what_compose_tells_the_daemon_is_right(compose: dict[str, Any]) -> None:
    environment = compose["services"]["kvhostd"]["environment"]
    command = [sys.executable, "-m", "kvhost_server", "--print-config"]
    printed = subprocess.run(
        command, env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, check=True
    ).stdout
    for name, value in environment.items():
        assert f'{name.removeprefix("KVHOST_").lower()} = "{value}"  # environment {name}' in printed
    assert f'socket = "{DEFAULT_SOCKET}"' in printed
    # The container may hold more than the pool.
    limit = int(compose["services"]["kvhostd"]["mem_limit"].removesuffix("m")) << 20
    assert limit >= parse_size(environment["KVHOST_MEMORY"]) + (256 << 20)


def test_what_compose_tells_the_engine_is_right(compose: dict[str, Any]) -> None:
    service = compose["services"]["vllm"]
    check_transfer(json.loads(service["command"][service["command"].index("--kv-transfer-config") + 1]))
    assert service["environment"]["KVHOST_SOCKET"] == DEFAULT_SOCKET
    assert "sockets:/run/kvhost" in service["volumes"]
    assert "sockets:/run/kvhost" in compose["services"]["kvhostd"]["volumes"]


def test_only_this_host_reaches_what_compose_starts(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_prometheus_and_grafana_find_what_they_need(compose: dict[str, Any]) -> None:
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    port = compose["services"]["kvhostd"]["environment"]["KVHOST_METRICS"].rpartition(":")[2]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in scraped}
    assert targets == {"kvhost": [f"kvhostd:{port}"], "vllm": ["vllm:8000"]}
    provisioning = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards/kvhost.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    [folder] = [source for source, target in mounts.items() if target == provider["options"]["path"]]
    assert list((FOLDER / folder).glob("*.json"))
