"""Drill 9 with real engines: weights change while stores and loads run, twice in a row, with the daemon gone.

Nothing from before is ever served to the engine that reset, a second engine of the namespace keeps its own,
and a reset takes no longer when nobody answers (I8, I12; A10).
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.drills import engines, tiny
from tests.drills.engines import Oracle, ask, ask_afresh, check, hand, wait_settled, wait_usable
from tests.drills.scale import Record, rounds, scale
from tests.e2e.engine import Engine
from tests.e2e.models import Recipe, prompt
from tests.support import Daemon, wait_for

pytestmark = pytest.mark.timeout(scale(600, 1800))

COUNT = 12
RESET_WITHIN_S = 1.0
MEMORY = "32MiB"


@dataclass
class Stage:
    """Two engines of one namespace; the weights of `one` change and change back."""

    one: Engine
    other: Engine
    daemon: Daemon
    oracle: Oracle
    model: Path
    flipped: bool = False
    seeds: int = 8000

    def fresh(self, length: int = 300) -> list[int]:
        self.seeds += 1
        return prompt(length, self.seeds)

    def expected(self, asked: list[int]) -> tuple[int, ...]:
        """What `one` says with the weights it has now."""
        return self.oracle.tokens(asked, COUNT, flipped=self.flipped)

    def change_weights(self, record: Record, *, running: bool = False, times: int = 1) -> str:
        """Other weights in `one`, and the connector is told; what vLLM refused, if it did."""
        hand(self.one, "flip_weights")
        self.flipped = not self.flipped
        told = hand(self.one, "reset", running, times)
        record.worst("reset_s", told["seconds"])
        assert told["seconds"] < RESET_WITHIN_S * times
        return str(told["refused"])

    def both_have(self, length: int = 300) -> list[int]:
        """A prompt whose chunks each engine has stored under the weights it has now."""
        asked = self.fresh(length)
        check(ask(self.one, asked, COUNT), self.expected(asked))
        check(ask(self.other, asked, COUNT), self.oracle.tokens(asked, COUNT))
        wait_settled(self.one)
        wait_settled(self.other)
        return asked

    def check_one(self, asked: list[int], *, stored: bool | None) -> None:
        """`one` is asked on an empty device: with nothing from before, and then with what it stored since.

        `stored` says whether it has stored the prompt since; None: it may have. Then the answer alone tells.
        """
        answer = ask_afresh(self.one, asked, COUNT)
        check(answer, self.expected(asked), "it was built on something from before the reset")
        if stored is False:
            assert answer.cached_tokens == 0, "something from before the reset was served"
        self._comes_back(self.one, asked, self.expected(asked))

    def check_other(self, asked: list[int], *, stored: bool = True) -> None:
        answer = ask_afresh(self.other, asked, COUNT)
        check(answer, self.oracle.tokens(asked, COUNT))
        if stored:
            assert answer.cached_tokens == len(asked) // 32 * 32, "it lost what was its own"
        self._comes_back(self.other, asked, self.oracle.tokens(asked, COUNT))

    def _comes_back(self, engine: Engine, asked: list[int], expected: tuple[int, ...]) -> None:
        """Right after a reset or a return slots to write into may be on their way: the next asker stores."""

        def complete() -> bool:
            answer = ask_afresh(engine, asked, COUNT)
            check(answer, expected, "it was built on something from before the reset")
            return answer.cached_tokens == len(asked) // 32 * 32

        wait_for(complete, 10, "the whole prompt to come from the cache")

    def check_quiet(self) -> None:
        engines.check_quiet(self.one)
        engines.check_quiet(self.other)
        pinned, _, quarantined = engines.held(self.daemon)
        assert (pinned, quarantined) == (0, 0)
        self.daemon.check_integrity()


@pytest.fixture(scope="module")
def stage(oracle: Oracle) -> Iterator[Stage]:
    oracle.launch()
    folder = Path(tempfile.mkdtemp(prefix="kvhost-"))
    model = folder / "model"
    tiny.copy_weights(Recipe(), model)
    daemon = Daemon(MEMORY, folder=folder)
    one, other = (engines.engine(model, daemon) for _ in range(2))
    try:
        for engine in (one, other):
            engine.launch()
        for engine in (one, other):
            wait_usable(engine.wait_ready())
        state = Stage(one, other, daemon, oracle, model)
        try:
            yield state
        finally:
            daemon = state.daemon
    finally:
        one.close()
        other.close()
        daemon.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice in a row"])
def test_with_stores_and_loads_in_flight(stage: Stage, times: int) -> None:
    with Record("9 real engines: reset with copies in flight") as record:
        for _ in range(rounds(2, 12)):
            known, new, shared = stage.both_have(), stage.fresh(), stage.both_have()
            wait_for(stage.one.reset_prefix_cache, 10, "the device's cache to be emptied")
            names = engines.hold_copies(stage.one, known, new, 60)
            assert names, "no load began on this machine"
            assert not stage.change_weights(record, times=times)
            # What they say is nobody's: half of it was computed before.
            assert {answer.finish_reason for answer in stage.one.wait(names)} == {"length"}
            # A load that the reset ended was computed anew, with the new weights, and may be stored.
            stage.check_one(known, stored=None)
            stage.check_one(new, stored=None)
            stage.check_one(shared, stored=False)
            stage.check_other(known)
            stage.check_other(shared)
            # The new chunks of `one` are of other weights: the other engine must not get them either.
            answer = ask_afresh(stage.other, new, COUNT)
            check(answer, stage.oracle.tokens(new, COUNT))
            assert answer.cached_tokens == 0
            stage.check_quiet()
            record.rounds += 1


def test_with_running_requests_preempted_while_their_stores_run(stage: Stage) -> None:
    """vLLM refuses this while a request waits for a load, and tells the connector nothing then."""
    with Record("9 real engines: reset that preempts, stores in flight") as record:
        for number in range(rounds(2, 12)):
            new, shared = stage.fresh(), stage.both_have()
            hand(stage.one, "hold", "store")
            names = [stage.one.submit(new, 60)]
            wait_for(lambda: "store" in hand(stage.one, "entered"), 30, "a store to begin")
            assert not stage.change_weights(record, running=True, times=1 + number % 2)
            stage.one.wait(names)
            stage.check_one(new, stored=None)
            stage.check_one(shared, stored=False)
            stage.check_other(shared)
            stage.check_quiet()
            record.rounds += 1


def test_requests_that_run_through_a_reset_store_nothing_old(stage: Stage) -> None:
    """A request decodes on while the weights change: its old blocks must not be stored as new ones."""
    with Record("9 real engines: reset under running requests") as record:
        for number in range(rounds(2, 12)):
            asked = stage.fresh()
            name = stage.one.submit(asked, 300)
            wait_for(lambda: stage.one.state().running == 1, 10, "the request to run")
            stage.change_weights(record, running=number % 2 == 1)
            stage.one.wait([name])
            # A preempted one is computed anew, with the new weights, and may be stored then.
            stage.check_one(asked, stored=None if number % 2 == 1 else False)
            stage.check_quiet()
            record.rounds += 1


def test_with_the_daemon_standing_still(stage: Stage) -> None:
    with Record("9 real engines: reset while the daemon stands still") as record:
        # Longer than any call may take: what the reset says must not be lost with the call.
        for frozen_s in (0.5, 6.5):
            known = stage.both_have()
            stage.daemon.freeze()
            try:
                stage.change_weights(record)
                until = engines.deadline(frozen_s)
                while not until():
                    asked = stage.fresh(100)
                    check(ask(stage.one, asked, COUNT), stage.expected(asked))
            finally:
                stage.daemon.thaw()
            thawed = engines.seconds_of(lambda: wait_usable(stage.one))
            record.worst("usable_again_s", thawed)
            wait_usable(stage.other)
            stage.check_one(known, stored=False)
            stage.check_other(known)
            stage.check_quiet()
            record.rounds += 1


def test_with_the_daemon_down(stage: Stage) -> None:
    with Record("9 real engines: reset while the daemon is down") as record:
        for times in (1, 2):
            known = stage.both_have()
            stage.daemon.kill()
            stage.change_weights(record, times=times, running=times == 2)
            check(ask(stage.one, known, COUNT), stage.expected(known))
            stage.daemon = Daemon(MEMORY, folder=stage.daemon.folder)
            for engine in (stage.one, stage.other):
                wait_usable(engine)
            # The other one stores what it knows; the first one must not be given it.
            stage.check_other(known, stored=False)
            stage.check_one(known, stored=False)
            stage.check_other(known)
            stage.check_quiet()
            record.rounds += 1


def test_weights_written_over_the_old_files(stage: Stage) -> None:
    with Record("9 real engines: other weights in the same files") as record:
        asked = stage.fresh()
        stage.check_other(asked, stored=False)
        stage.other.close()
        tiny.copy_weights(Recipe(seed=1), stage.model)
        with engines.engine(stage.model, stage.daemon) as tuned:
            wait_usable(tuned)
            answer = ask(tuned, asked, COUNT)
            assert answer.cached_tokens == 0, "it was given what the old weights had computed"
            assert answer.tokens != stage.oracle.tokens(asked, COUNT)
            again = ask_afresh(tuned, asked, COUNT)
            check(again, answer.tokens)
            assert again.cached_tokens == 288
            engines.check_quiet(tuned)
        record.rounds += 1
