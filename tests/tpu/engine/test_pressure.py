"""Little room on the device and in the pool, a daemon that dies: the right tokens all the same."""

from __future__ import annotations

import pytest

from tests.e2e.models import prompt
from tests.support.daemon import Daemon
from tests.tpu.engine.world import attached, engine, one_by_one, right_answers, settled

pytestmark = pytest.mark.timeout(3000)

# 19 blocks of 16 tokens can be used: less than two of these prompts need.
SMALL = {"num_gpu_blocks_override": 20, "max_model_len": 288}
A, B = prompt(200, seed=11), prompt(200, seed=12)
# Eight blocks each at their end: four at once do not fit, somebody is preempted.
CROWD = [prompt(60, seed=20 + number) for number in range(4)]
CROWD_TOKENS = 60
MANY = [prompt(120, seed=40 + number) for number in range(8)]


def test_blocks_are_saved_before_they_are_computed_anew_and_preemption() -> None:
    wanted_a, wanted_b = right_answers([A, B], 4)
    crowd = right_answers(CROWD, CROWD_TOKENS)
    with Daemon("64MiB") as daemon, engine(daemon, **SMALL) as tested:
        attached(tested)
        # A's blocks are still to be saved when B is computed in them.
        for _ in range(3):
            for asked, wanted in ((A, wanted_a), (B, wanted_b)):
                (answer,) = one_by_one(tested, [asked], 1)
                assert answer.tokens == wanted[:1]
        settled(tested)
        assert tested.reset_prefix_cache()
        for asked, wanted in ((A, wanted_a), (B, wanted_b), (A, wanted_a)):
            (answer,) = one_by_one(tested, [asked], 4)
            assert answer.tokens == wanted
            assert answer.cached_tokens == 192
        # Twice: computed and preempted, then loaded and preempted.
        for _ in range(2):
            answers = tested.generate(CROWD, max_tokens=CROWD_TOKENS, deadline_s=600)
            assert [answer.tokens for answer in answers] == crowd
            settled(tested)
            assert tested.reset_prefix_cache()
        assert tested.metric("vllm:num_preemptions") > 0
        # A load that fails half-way is reported, and its blocks are computed.
        tested.call("tests.e2e.kvhost:fail_copies", "load", 1, 3)
        (answer,) = one_by_one(tested, [A], 4)
        assert answer.tokens == wanted_a
        assert tested.call("tests.e2e.kvhost:failed_copies") == 1
        assert tested.metric("vllm:kvhost_failed_loads") == 1
        # New weights: nothing of before is served.
        settled(tested)
        assert tested.reset_prefix_cache(connector=True)
        attached(tested)
        (answer,) = one_by_one(tested, [A], 4)
        assert (answer.tokens, answer.cached_tokens) == (wanted_a, 0)
        daemon.check_integrity()


def test_a_small_pool_and_a_daemon_that_is_killed() -> None:
    wanted = right_answers(MANY, 8)
    # Staging memory for four blocks: every transfer is cut.
    settings = {"staging_bytes": 4 * 16 * 8 * 128 * 4 * 2, "attach_wait_ms": 2000, "deadline_ms": 2000}
    with Daemon("4MiB") as daemon, engine(daemon, settings=settings, **SMALL) as tested:
        attached(tested)
        for _ in range(2):
            answers = one_by_one(tested, MANY, 8)
            assert [answer.tokens for answer in answers] == wanted
            settled(tested)
            assert tested.reset_prefix_cache()
        assert daemon.status().counters["evicted_chunks"] > 0
        daemon.check_integrity()
        (warm,) = one_by_one(tested, MANY[-1:], 8)
        assert warm.tokens == wanted[-1]

        names = [tested.submit(asked, 8) for asked in MANY]
        daemon.kill()
        answers = tested.wait(names, 600)
        assert [answer.tokens for answer in answers] == wanted
        with Daemon("16MiB", folder=daemon.folder) as another:
            attached(tested)
            assert tested.reset_prefix_cache()
            assert [answer.tokens for answer in one_by_one(tested, MANY[:2], 8)] == wanted[:2]
            settled(tested)
            assert tested.reset_prefix_cache()
            for answer in one_by_one(tested, MANY[:2], 8):
                assert answer.cached_tokens == 112
            another.check_integrity()
