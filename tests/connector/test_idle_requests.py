"""Requests that native need not look at in a step: what is left out, and what never is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvhost_connector.compat import IdleRequests

TOKENS = 32


def half(*, prompts_only: bool = True, groups: int = 1) -> Any:
    config = SimpleNamespace(
        offload_prompt_only=prompts_only,
        kv_group_configs=[SimpleNamespace(tokens_per_chunk=TOKENS) for _ in range(groups)],
    )
    return SimpleNamespace(config=config, _req_status={})


def add(owner: Any, req_id: str, prompt: int, stored: list[int]) -> Any:
    states = [SimpleNamespace(next_stored_chunk_idx=index) for index in stored]
    status = SimpleNamespace(req=SimpleNamespace(num_prompt_tokens=prompt), group_states=states)
    owner._req_status[req_id] = status
    return status


def output(scheduled: list[str], blocks: dict[str, Any] | None = None, resumed: tuple[str, ...] = ()) -> Any:
    cached = SimpleNamespace(
        req_ids=list(scheduled),
        new_block_ids=[(blocks or {}).get(req_id) for req_id in scheduled],
        resumed_req_ids=set(resumed),
    )
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(scheduled, 1),
        scheduled_cached_reqs=cached,
        finished_req_ids={"gone"},
        preempted_req_ids=None,
    )


def test_what_only_decodes_is_left_out_and_everything_else_is_as_it_was() -> None:
    owner = half()
    add(owner, "done", 100, [3])
    add(owner, "prefill", 100, [2])
    trimmed = IdleRequests(owner).leave_out(output(["done", "prefill", "unknown"]))
    assert trimmed.num_scheduled_tokens == {"prefill": 1, "unknown": 1}
    assert trimmed.scheduled_cached_reqs.req_ids == ["prefill", "unknown"]
    assert trimmed.finished_req_ids == {"gone"}
    assert trimmed.preempted_req_ids is None


def test_new_blocks_are_always_noted() -> None:
    owner = half()
    add(owner, "done", 64, [2])
    add(owner, "back", 64, [2])
    idle = IdleRequests(owner)
    trimmed = idle.leave_out(output(["done", "back"], blocks={"done": ([7],)}, resumed=("back",)))
    assert trimmed.num_scheduled_tokens == {}
    assert trimmed.scheduled_cached_reqs.req_ids == ["done", "back"]
    assert trimmed.scheduled_cached_reqs.new_block_ids == [([7],), None]


def test_every_group_must_have_offered_its_prompt() -> None:
    owner = half(groups=2)
    add(owner, "half", 64, [2, 1])
    assert IdleRequests(owner).leave_out(output(["half"])).num_scheduled_tokens == {"half": 1}


@pytest.mark.parametrize("how", ["awaken", "awaken_all", "longer prompt"])
def test_what_moved_back_is_looked_at_again(how: str) -> None:
    owner = half()
    status = add(owner, "one", 64, [2])
    idle = IdleRequests(owner)
    assert idle.leave_out(output(["one"])).num_scheduled_tokens == {}
    if how == "longer prompt":
        status.req.num_prompt_tokens = 96
    else:
        status.group_states[0].next_stored_chunk_idx = 0
        idle.awaken("one") if how == "awaken" else idle.awaken_all()
    assert idle.leave_out(output(["one"])).num_scheduled_tokens == {"one": 1}


def test_nothing_is_left_out_where_answers_are_stored_too() -> None:
    owner = half(prompts_only=False)
    add(owner, "done", 64, [2])
    step = output(["done"])
    assert IdleRequests(owner).leave_out(step) is step
