"""Set-ups that are not served end the start of the engine with a sentence; old variables are named."""

from __future__ import annotations

import pytest

from tests.e2e.engine import EngineDied
from tests.support.daemon import Daemon
from tests.tpu.engine.world import engine

pytestmark = pytest.mark.timeout(3000)


def test_attention_data_parallelism_is_refused() -> None:
    strategy = {"sharding": {"sharding_strategy": {"enable_dp_attention": True, "attn_dp_size": 2}}}
    with (
        Daemon("4MiB") as daemon,
        pytest.raises(EngineDied, match="kvhost does not serve attention data parallelism"),
    ):
        engine(
            daemon, devices=2, environment={"NEW_MODEL_DESIGN": "1"}, additional_config=strategy
        ).start().close()
