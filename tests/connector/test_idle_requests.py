"""Requests that native need not look at in a step: what is left out, and what never is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvhost_connector.compat import OFFERED_A_STEP, WAITING_PART, IdleRequests

TOKENS = 32


def half(*, prompts_only: bool = True, groups: int = 1, window: int | None = None) -> Any:
    config = SimpleNamespace(
        offload_prompt_only=prompts_only,
        kv_group_configs=[
            SimpleNamespace(
                tokens_per_chunk=TOKENS, sliding_window_size_in_chunks=window, is_eagle_group=False
            )
            for _ in range(groups)
        ],
    )
    return SimpleNamespace(config=config, _req_status={})


def idle_requests(owner: Any, *, grants: int = 10_000) -> IdleRequests:
    return IdleRequests(owner, lambda: grants)


def add(owner: Any, req_id: str, prompt: int, stored: list[int]) -> Any:
    keys = [b"%d" % number for number in range(prompt // TOKENS)]
    states = [SimpleNamespace(next_stored_chunk_idx=index, offload_keys=keys) for index in stored]
    request = SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=prompt)
    status = SimpleNamespace(req=request, group_states=states, max_offload_tokens=None)
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
    trimmed = idle_requests(owner).leave_out(output(["done", "prefill", "unknown"]))
    assert trimmed.num_scheduled_tokens == {"prefill": 1, "unknown": 1}
    assert trimmed.scheduled_cached_reqs.req_ids == ["prefill", "unknown"]
    assert trimmed.finished_req_ids == {"gone"}
    assert trimmed.preempted_req_ids is None


def test_new_blocks_are_always_noted() -> None:
    owner = half()
    add(owner, "done", 64, [2])
    add(owner, "back", 64, [2])
    idle = idle_requests(owner)
    trimmed = idle.leave_out(output(["done", "back"], blocks={"done": ([7],)}, resumed=("back",)))
    assert trimmed.num_scheduled_tokens == {}
    assert trimmed.scheduled_cached_reqs.req_ids == ["done", "back"]
    assert trimmed.scheduled_cached_reqs.new_block_ids == [([7],), None]


def test_every_group_must_have_offered_its_prompt() -> None:
    owner = half(groups=2)
    add(owner, "half", 64, [2, 1])
    assert idle_requests(owner).leave_out(output(["half"])).num_scheduled_tokens == {"half": 1}


@pytest.mark.parametrize("how", ["awaken", "awaken_all", "longer prompt"])
def test_what_moved_back_is_looked_at_again(how: str) -> None:
    owner = half()
    status = add(owner, "one", 64, [2])
    idle = idle_requests(owner)
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
    assert idle_requests(owner).leave_out(step) is step


def test_prompts_that_become_complete_together_are_offered_over_several_steps() -> None:
    owner = half()
    long = (OFFERED_A_STEP - 1) * TOKENS
    for name in ("a", "b", "c"):
        add(owner, name, long, [0])
    idle = idle_requests(owner)
    for name in ("a", "b", "c"):
        names = [left for left in ("a", "b", "c") if left >= name]
        assert list(idle.leave_out(output(names)).num_scheduled_tokens) == [name]
        owner._req_status[name].group_states[0].next_stored_chunk_idx = OFFERED_A_STEP - 1
    assert not idle.leave_out(output(["a", "b", "c"])).num_scheduled_tokens


@pytest.mark.parametrize("grants", [0, 100, 400])
def test_no_more_waits_than_grants_are_there_for(grants: int) -> None:
    """Requests that end are offered at once: their blocks go to others."""
    owner = half()
    names = [f"r{number}" for number in range(64)]
    for name in names:
        add(owner, name, 8 * TOKENS, [0])
    offered = idle_requests(owner, grants=grants).leave_out(output(names)).num_scheduled_tokens
    waiting = 8 * (len(names) - len(offered))
    assert grants // WAITING_PART <= waiting < grants // WAITING_PART + 8


def test_what_must_not_be_stored_keeps_nobody_waiting() -> None:
    owner = half()
    add(owner, "held back", OFFERED_A_STEP * TOKENS, [0]).max_offload_tokens = 0
    add(owner, "b", OFFERED_A_STEP * TOKENS, [0])
    assert "b" in idle_requests(owner).leave_out(output(["held back", "b"])).num_scheduled_tokens


def test_blocks_of_windows_do_not_wait() -> None:
    owner = half(window=2)
    for name in ("a", "b"):
        add(owner, name, OFFERED_A_STEP * TOKENS, [0])
    assert list(idle_requests(owner).leave_out(output(["a", "b"])).num_scheduled_tokens) == ["a", "b"]
