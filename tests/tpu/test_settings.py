"""The variables of the in-process offload: taken over, or named with what stands in their place."""

from __future__ import annotations

from typing import Any

import pytest

from kvhost_connector.config import ConfigError, ConnectorConfig, HostMemory
from kvhost_connector.tpu.settings import DEFAULT_STAGING_BYTES, VARIABLES, staging_bytes, take_over, warning


def taken(extra: dict[str, Any] | None = None, **environment: str) -> ConnectorConfig:
    settings = dict(extra or {})
    take_over(settings, {f"TPU_OFFLOAD_{name}": value for name, value in environment.items()})
    return ConnectorConfig.parse(settings, {})


def test_nothing_set_is_nothing_said() -> None:
    assert taken() == ConnectorConfig.parse({}, {})
    assert warning(1000, {}) == ""


def test_what_has_a_setting_is_taken_over() -> None:
    config = taken(
        DECODE_SAVE="1",
        SAVE_THREADS="4",
        SKIP_JAX_PRECOMPILE="1",
        BLOCK_SIZE_BUCKETS="1,2, 16",
        USE_UNPINNED_HOST="1",
    )
    assert config.offload_prompt_only is False
    assert config.copy_threads == 4
    assert config.compile_ahead is False
    assert config.block_buckets == (1, 2, 16)
    assert config.host_memory is HostMemory.UNPINNED


def test_defaults_of_the_old_variables_mean_the_same() -> None:
    config = taken(DECODE_SAVE="0", SAVE_THREADS="1", SKIP_JAX_PRECOMPILE="0", USE_UNPINNED_HOST="0")
    assert config.offload_prompt_only
    assert config.compile_ahead
    assert config.host_memory is HostMemory.AUTO


def test_settings_go_before_the_environment() -> None:
    assert taken(
        {"copy_threads": 3, "offload_prompt_only": True}, SAVE_THREADS="9", DECODE_SAVE="1"
    ) == taken({"copy_threads": 3, "offload_prompt_only": True})


def test_staging_in_blocks_or_bytes() -> None:
    environment = {"TPU_OFFLOAD_NUM_STAGING_BLOCKS": "128"}
    assert staging_bytes(None, 1000, environment) == 128_000
    assert staging_bytes(5000, 1000, environment) == 5000
    assert staging_bytes(None, 1000, {}) == DEFAULT_STAGING_BYTES
    assert staging_bytes(None, DEFAULT_STAGING_BYTES, {}) == 2 * DEFAULT_STAGING_BYTES


def test_one_warning_names_every_variable() -> None:
    values = {name: "1" for name in VARIABLES}
    text = warning(1 << 30, values)
    for name in VARIABLES:
        assert name in text
    assert "kvhostd's --memory" in text
    assert "(here 1 blocks are 1 GiB)" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("SAVE_THREADS", "many"), ("BLOCK_SIZE_BUCKETS", "1,0"), ("NUM_CPU_CHUNKS", "-1")],
)
def test_what_cannot_be_read_is_an_error_of_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"TPU_OFFLOAD_{name} must be .*, found '{value}'"):
        taken(**{name: value})
