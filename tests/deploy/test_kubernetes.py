"""deploy/kubernetes: kubectl builds every overlay, which is held to Kubernetes' schemas and to our own rules.

No cluster runs here: what the kubelet does with them is not seen.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvhost_server.units import parse_size
from tests.support.options import check_transfer
from tests.support.tools import tool

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "cuda", "tpu", "cuda-hugepages", "shared")
SIDECARS = ("cpu", "cuda", "tpu", "cuda-hugepages")
# The oldest with native sidecars by default, and the newest whose schemas there are.
VERSIONS = ("1.29.0", kubernetes_validate.latest_version())
# vLLM's own settings that engines of the manifests get.
FOREIGN = {"MODEL", "KV_TRANSFER", "VLLM_CPU_KVCACHE_SPACE"}
_UNITS = {"Ki": 10, "Mi": 20, "Gi": 30}

Object = dict[str, Any]


@functools.cache
def built(overlay: str) -> list[Object]:
    command = [tool("kubectl"), "kustomize", str(FOLDER / "overlays" / overlay)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return [item for item in yaml.safe_load_all(result.stdout) if item]


def kind(overlay: str, name: str) -> list[Object]:
    return [item for item in built(overlay) if item["kind"] == name]


def pods(overlay: str) -> Iterator[Object]:
    for item in built(overlay):
        if item["kind"] in ("Deployment", "DaemonSet"):
            yield item["spec"]["template"]


def containers(overlay: str, name: str) -> list[Object]:
    every = [
        container
        for pod in pods(overlay)
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
    ]
    return [container for container in every if container["name"] == name]


def environment(container: Object) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def amount(quantity: str) -> int:
    return int(quantity[:-2]) << _UNITS[quantity[-2:]]


def test_every_overlay_is_listed() -> None:
    assert {path.name for path in (FOLDER / "overlays").iterdir()} == set(OVERLAYS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_are_as_kubernetes_says(overlay: str, version: str) -> None:
    for item in built(overlay):
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_daemon_is_told_is_right(overlay: str) -> None:
    [daemon] = containers(overlay, "kvhostd")
    told = environment(daemon)
    command = [sys.executable, "-m", "kvhost_server", "--print-config"]
    printed = subprocess.run(
        command, env={"PATH": os.environ["PATH"], **told}, capture_output=True, text=True, check=True
    ).stdout
    for name in told:
        assert f"# environment {name}\n" in printed
    port = told["KVHOST_METRICS"].rpartition(":")[2]
    assert daemon["ports"] == [{"name": "metrics", "containerPort": int(port)}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_memory_is_asked_for_as_it_is_limited_and_holds_the_pool(overlay: str) -> None:
    """A pool that is larger than its container ends with it."""
    [daemon] = containers(overlay, "kvhostd")
    requests, limits = daemon["resources"]["requests"], daemon["resources"]["limits"]
    assert requests["memory"] == limits["memory"]
    assert "cpu" not in limits
    pool = parse_size(environment(daemon)["KVHOST_MEMORY"])
    if "KVHOST_HUGEPAGES" in environment(daemon):
        assert amount(limits["hugepages-2Mi"]) == amount(requests["hugepages-2Mi"]) == pool
        pool = 0
    assert amount(limits["memory"]) >= pool + (512 << 20)
    for engine in containers(overlay, "vllm"):
        assert engine["resources"]["requests"]["memory"] == engine["resources"]["limits"]["memory"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_liveness_does_not_wait_for_the_pool(overlay: str) -> None:
    """Populating takes minutes; a probe that ends the daemon meanwhile ends it again and again."""
    [daemon] = containers(overlay, "kvhostd")
    assert daemon["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
    startup = daemon["startupProbe"]
    if overlay in SIDECARS:
        # The engine's container starts when this one succeeds.
        assert startup["httpGet"]["path"] == "/livez"
        assert "readinessProbe" not in daemon
    else:
        assert startup["httpGet"]["path"] == "/readyz"
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
        assert daemon["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_engine_and_daemon_share_the_folder_of_the_sockets(overlay: str) -> None:
    [daemon], [engine] = containers(overlay, "kvhostd"), containers(overlay, "vllm")
    assert environment(engine)["KVHOST_SOCKET"] == environment(daemon).get(
        "KVHOST_SOCKET", "/run/kvhost/kvhostd.sock"
    )
    group = int(environment(daemon)["KVHOST_SOCKET_GROUP"])
    for container in (daemon, engine):
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "sockets"]
        assert mount["mountPath"] == "/run/kvhost"
        assert "subPath" not in mount
    volumes = [v for pod in pods(overlay) for v in pod["spec"]["volumes"] if v["name"] == "sockets"]
    assert len({json.dumps(volume) for volume in volumes}) == 1
    for pod in pods(overlay):
        security = pod["spec"]["securityContext"]
        members = [security.get("fsGroup"), *security.get("supplementalGroups", ())]
        assert group in members or pod["spec"]["containers"][0] == daemon


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_engine_is_told_to_use_the_cache(overlay: str) -> None:
    [engine] = containers(overlay, "vllm")
    told = environment(engine)
    transfer = json.loads(told["KV_TRANSFER"])
    check_transfer(transfer)
    assert (transfer["kv_connector"] == "TPUOffloadConnector") == (overlay == "tpu")
    assert "--kv-transfer-config=$(KV_TRANSFER)" in engine["args"]
    assert {name for name in told if not name.startswith("KVHOST_")} <= FOREIGN
    # Where the namespace has a Service called vllm, links would set VLLM_PORT.
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods(overlay))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_daemon_has_no_privileges(overlay: str) -> None:
    [daemon] = containers(overlay, "kvhostd")
    security = daemon["securityContext"]
    assert security["runAsNonRoot"]
    assert security["runAsUser"] > 0
    assert security["readOnlyRootFilesystem"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    for pod in pods(overlay):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostIPC", "hostNetwork", "hostPID"} & set(pod["spec"])


@pytest.mark.parametrize("overlay", SIDECARS)
def test_the_sidecar_is_a_native_one(overlay: str) -> None:
    [pod] = pods(overlay)
    [daemon] = pod["spec"]["initContainers"]
    assert daemon["restartPolicy"] == "Always"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_budgets_policies_and_services_select_what_there_is(overlay: str) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(overlay)]

    def selects(selector: dict[str, str]) -> bool:
        return any(selector.items() <= found.items() for found in labels)

    [budget] = kind(overlay, "PodDisruptionBudget")
    assert selects(budget["spec"]["selector"]["matchLabels"])
    policies = kind(overlay, "NetworkPolicy")
    covered = [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    assert all(any(one.items() <= found.items() for one in covered) for found in labels)
    [service] = kind(overlay, "Service")
    assert selects(service["spec"]["selector"])
    ports = {
        port["name"]
        for pod in pods(overlay)
        for container in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
        for port in container.get("ports", ())
    }
    named = re.findall(r"port: (metrics|http)", yaml.safe_dump_all(policies))
    assert set(named) == ports == {"metrics", "http"}


def test_accelerators_are_the_engines_alone() -> None:
    for overlay, device in (
        ("cuda", "nvidia.com/gpu"),
        ("tpu", "google.com/tpu"),
        ("shared", "nvidia.com/gpu"),
    ):
        [daemon], [engine] = containers(overlay, "kvhostd"), containers(overlay, "vllm")
        assert engine["resources"]["limits"][device] == "1"
        assert device not in daemon["resources"]["limits"]
