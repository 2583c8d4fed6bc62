"""The settings: every key checked, every mistake one line that says what was found and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from kvhost_connector.config import KEYS, SPEC_MODULE, SPEC_NAME, ConfigError, ConnectorConfig, prepare

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"socket": ""}, "socket"),
    ({"socket": 5}, "socket"),
    ({"namespace": None}, "namespace"),
    ({"weights_version": 3}, "weights_version"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"deadline_ms": "100"}, "deadline_ms"),
    ({"deadline_ms": True}, "deadline_ms"),
    ({"deadline_ms": 10_001}, "deadline_ms"),
    ({"attach_wait_ms": -1}, "attach_wait_ms"),
    ({"copy_threads": 0}, "copy_threads"),
    ({"copy": "fast"}, "copy"),
    ({"copy": ["native"]}, "copy"),
    ({"pin": "yes"}, "pin"),
    ({"pin": True}, "pin"),
    ({"cross_layer_blocks": "true"}, "cross_layer_blocks"),
    ({"blocks_per_chunk": 0}, "blocks_per_chunk"),
    ({"blocks_per_chunk": 1.5}, "blocks_per_chunk"),
    ({"block_size": 0}, "block_size"),
    ({"offload_prompt_only": "false"}, "offload_prompt_only"),
    ({"self_describing_kv_events": 1}, "self_describing_kv_events"),
    ({"spec_name": "CPUOffloadingSpec"}, "spec_name"),
    ({"canonical_layout": True}, "canonical_layout"),
    ({"sync_load_budget_bytes": 4096}, "sync_load_budget_bytes"),
    ({"blocks_per_chunk": 2, "block_size": 64}, "blocks_per_chunk and block_size"),
]


def test_defaults_need_nothing() -> None:
    config = ConnectorConfig.parse({}, {})
    assert config.socket == "/run/kvhost/kvhostd.sock"
    assert config.deadline_s == 0.1
    assert config.offload_prompt_only


def test_socket_comes_from_the_environment_and_the_key_wins() -> None:
    assert ConnectorConfig.parse({}, {"KVHOST_SOCKET": "/a.sock"}).socket == "/a.sock"
    assert ConnectorConfig.parse({"socket": "/b.sock"}, {"KVHOST_SOCKET": "/a.sock"}).socket == "/b.sock"


@pytest.mark.parametrize(("extra", "named"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_one_line_that_names_key_and_value(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig.parse(extra, {})
    message = str(caught.value)
    assert named in message
    assert "\n" not in message
    assert any(repr(value) in message or "true" in message for value in extra.values())


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'dedline_ms'.*did you mean 'deadline_ms'"):
        ConnectorConfig.parse({"dedline_ms": 5}, {})


def test_an_unknown_key_unlike_any_other_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="unknown key 'xyzzy'") as caught:
        ConnectorConfig.parse({"xyzzy": 5}, {})
    assert all(key.name in str(caught.value) for key in KEYS)
    assert "did you mean" not in str(caught.value)


def test_prepare_points_native_at_our_spec_and_forbids_synchronous_loads() -> None:
    extra: dict[str, Any] = {"socket": "/a.sock"}
    prepare(extra)
    assert (extra["spec_name"], extra["spec_module_path"]) == (SPEC_NAME, SPEC_MODULE)
    assert extra["sync_load_budget_bytes"] == 0
    # What prepare wrote is no mistake of the user's: the class methods run it again.
    assert prepare(extra).socket == "/a.sock"


def test_every_key_says_what_it_means_and_allows() -> None:
    for key in KEYS:
        assert key.meaning.endswith(".")
        assert key.allowed
        if key.default is not None:
            assert key.parse(key.default) == key.default
