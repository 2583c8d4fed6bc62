"""The choice of a worker: by vLLM's platform, once, and refused by name where there is none."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.platforms.interface import Platform as VllmPlatform
from vllm.platforms.interface import PlatformEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvhost_client.types import Access
from kvhost_connector import compat, platforms
from kvhost_connector.config import ConfigError
from kvhost_connector.platforms import Platform
from tests.connector.sim import Shape, Sim, kv_transfer, vllm_config


def vllm_platform(kind: PlatformEnum, name: str) -> Any:
    """vLLM's real base class, as a platform's own class sets it up."""

    class Made(VllmPlatform):
        _enum = kind
        device_name = name
        device_type = name

    return Made()


@pytest.mark.parametrize(
    ("kind", "platform"),
    [
        (PlatformEnum.CPU, Platform.HOST),
        (PlatformEnum.CUDA, Platform.CUDA),
        (PlatformEnum.ROCM, Platform.ROCM),
        (PlatformEnum.XPU, Platform.XPU),
    ],
)
def test_each_platform_of_vllm_has_its_worker(kind: PlatformEnum, platform: Platform) -> None:
    assert platforms.choose(vllm_platform(kind, "x")) is platform


def test_a_platform_without_a_worker_is_refused_by_name() -> None:
    for kind in (PlatformEnum.OOT, PlatformEnum.UNSPECIFIED):
        with pytest.raises(ConfigError, match="no worker for vLLM's platform 'abacus'; it serves host"):
            platforms.choose(vllm_platform(kind, "abacus"))
    with pytest.raises(ConfigError, match="TPUOffloadConnector"):
        platforms.choose(vllm_platform(PlatformEnum.TPU, "tpu"))


def test_every_platform_is_named_when_one_is_refused() -> None:
    assert all(platform.value in platforms.served() for platform in Platform)


def test_only_devices_that_copy_by_themselves_write_by_dma() -> None:
    by_dma = {platform for platform in Platform if platform.access is Access.DEVICE_DMA}
    assert by_dma == {Platform.CUDA, Platform.ROCM, Platform.XPU}
    assert all(platform.has_driver == (platform in by_dma) for platform in Platform)


def test_layouts_in_which_a_page_lies_in_one_piece_are_served() -> None:
    served = {layout.name for layout in KVCacheLayout if layout.is_block_compact}
    assert set(platforms.LAYOUTS) == served
    assert platforms.CROSS_LAYER in served
    assert KVCacheLayout[platforms.CROSS_LAYER].is_block_outermost
    for layout in (*served, None):
        platforms.refuse_layout(layout)
    with pytest.raises(ConfigError, match=r"layout BHLNC.*it serves LBHNC, LBNHC, BLHNC, BLNHC"):
        platforms.refuse_layout("BHLNC")


def test_an_engine_with_another_layout_does_not_start() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from kvhost_connector import KVHostConnector
    from tests.connector.sim import kv_cache_config

    shape = Shape()
    config = kv_cache_config(shape)
    object.__setattr__(config, "kv_cache_layout", "LHBNC")
    engine = vllm_config(shape, kv_transfer("/nowhere/kvhostd.sock"))
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        with pytest.raises(ConfigError, match="LHBNC"):
            KVHostConnector(engine, role, config)


def test_an_engine_whose_cache_may_go_to_sleep_does_not_start_on_a_device() -> None:
    engine = vllm_config(Shape(), kv_transfer("/nowhere/kvhostd.sock"))
    engine.model_config.enable_sleep_mode = True
    platforms.refuse_sleep_mode(engine, Platform.HOST)
    with pytest.raises(ConfigError, match="sleep mode on a GPU"):
        platforms.refuse_sleep_mode(engine, Platform.CUDA)
    engine.model_config.enable_sleep_mode = False
    platforms.refuse_sleep_mode(engine, Platform.CUDA)


def test_a_vllm_whose_transfer_code_is_another_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

    compat.check_transfers()
    monkeypatch.delattr(SingleDirectionOffloadingHandler, "transfer_async")
    with pytest.raises(compat.IncompatibleVLLM, match=r"SingleDirectionOffloadingHandler\.transfer_async"):
        compat.check_transfers()


def test_the_layout_with_one_copy_a_block_is_asked_for_where_a_device_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvhost_connector import KVHostConnector

    asking = vllm_config(Shape(), kv_transfer("/nowhere/kvhostd.sock", cross_layer_blocks=True))
    assert KVHostConnector.get_required_kvcache_layout(asking) == "LBHNC"
    monkeypatch.setattr(KVHostConnector, "PLATFORM", Platform.CUDA)
    assert KVHostConnector.get_required_kvcache_layout(asking) == "BLHNC"
    silent = vllm_config(Shape(), kv_transfer("/nowhere/kvhostd.sock"))
    assert KVHostConnector.get_required_kvcache_layout(silent) == "LBHNC"


class Heard(logging.Handler):
    """What a logger said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_the_choice_is_logged_once_in_each_half_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    monkeypatch.setattr(platforms.logger, "handlers", [heard])
    platforms.logger.setLevel(logging.INFO)
    with Sim(Shape(), kv_transfer("/nowhere/kvhostd.sock", attach_wait_ms=0)) as sim:
        assert [line for line in heard.lines if "platform" in line] == [
            "kvhost: platform host, copies by processor threads, worker's half",
            "kvhost: platform host, copies by processor threads, scheduler's half",
        ]
        report = sim.workers[0].connector.get_handshake_metadata()
        assert (report.platform, report.memory) == ("host", "host")
        stats = sim.connector.get_kv_connector_stats()
        [(labels, count)] = stats.data["data"]["vllm:kvhost_workers"].items()
        assert (labels[:2], count) == (("host", "host"), 1)
