"""Functions that run in a stepped engine's own process: they look inside, hold copies, and break things.

The engine does not step while one of them runs; those that need steps make them.
"""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from kvhost_connector import matching
from tests.connector.plane import plane

_HELD_PART = matching.HELD_PART


def _core(engine: Any) -> Any:
    return engine.engine_core.engine_core


def _scheduling(engine: Any) -> Any:
    return _core(engine).scheduler.connector.scheduling


# Looking.


def usable(engine: Any, _: list[Any]) -> bool:
    """Whether a lookup asked now can hit."""
    return bool(_scheduling(engine).board.usable)


def holds(engine: Any, _: list[Any]) -> dict[str, Any]:
    """What the scheduler half keeps."""
    side = _scheduling(engine)
    return {
        "idle": bool(side.board.idle),
        "transfers": int(side.manager.open_transfers()),
        "stock": len(side.board.stock),
        "broken": bool(side._broken),
        "views": len(side.manager._views),
    }


def entered(engine: Any, _: list[Any]) -> dict[str, int]:
    """How many chunks asked the fault plane, by direction, and how many were made to fail."""
    return {**plane.entered, "failed": plane.failed}


# Blocks.


def _caches(engine: Any) -> Any:
    return _core(engine).model_executor.driver_worker.model_runner.kv_caches


def clear_blocks(engine: Any, _: list[Any]) -> None:
    """Nothing of what the device held can be found there by accident."""
    for cache in _caches(engine):
        cache.zero_()


def block_prints(engine: Any, _: list[Any]) -> list[list[str]]:
    """A digest of every block's bytes, layer by layer; blocks are the first axis."""
    return [
        [hashlib.sha256(block.contiguous().numpy().tobytes()).hexdigest()[:16] for block in cache]
        for cache in _caches(engine)
    ]


# Copies.


def hold(engine: Any, directions: list[Any]) -> None:
    plane.entered.clear()
    plane.hold(*directions)


def go(engine: Any, _: list[Any]) -> None:
    plane.go()


def fail(engine: Any, arguments: list[Any]) -> None:
    """[direction, chunks, skip]: so many chunks fail, after `skip` good ones."""
    direction, chunks, skip = arguments
    plane.failed = 0
    plane.fail(direction, chunks, skip=skip)


def trouble(engine: Any, arguments: list[Any]) -> None:
    """[rate, delay_s]: chunks fail at this rate and take up to so much longer."""
    plane.rate, plane.delay_s = arguments
    plane.failed = 0


# The daemon, stopped at a point of the connector's course.


def stop_daemon_at(engine: Any, arguments: list[Any]) -> None:
    """[point, pid]: SIGSTOP the next time the scheduler half does this, before it is done.

    Points: "lookup" and "pin" (the question), "hold" (what a lookup found is pinned before it is answered),
    "load" (slots of pinned chunks are handed to the copy), "commit" (the store is reported written),
    "release" (the load is reported read).
    """
    point, pid = arguments
    side = _scheduling(engine)
    owner, name, concerned = {
        "lookup": (side.board, "ask", lambda named, *_: not named.get("pin")),
        "pin": (side.board, "ask", lambda named, *_: named.get("pin")),
        "hold": (side._agent, "_look_up", lambda named, _, asked: named["pin"] and asked),
        "load": (side.manager, "prepare_load", lambda named, *_: True),
        "commit": (side.board, "commit", lambda named, *_: True),
        "release": (side.board, "release", lambda named, *_: True),
    }[point]
    method = getattr(type(owner), name).__get__(owner)
    _hold_at_once(point != "pin")

    def stopping(*arguments: Any, **named: Any) -> Any:
        if concerned(named, *arguments):
            delattr(owner, name)
            _hold_at_once(True)
            os.kill(pid, signal.SIGSTOP)
        return method(*arguments, **named)

    setattr(owner, name, stopping)


# Weights.


def flip_weights(engine: Any, _: list[Any]) -> None:
    """Other weights in the running engine: all tokens change embeddings. Twice is not at all."""
    model = _core(engine).model_executor.driver_worker.get_model()
    weight = model.model.embed_tokens.weight.data
    weight.copy_(weight.flip(0))


def reset(engine: Any, arguments: list[Any]) -> dict[str, Any]:
    """[running, times]: tells the connector that the weights changed, so many times without a step between.

    vLLM refuses by an exception while a request waits for a load and running ones are to be preempted. Held
    copies go on a moment later, while the engine's next step waits for those whose blocks it takes.
    """
    running, times = arguments
    threading.Timer(0.1, plane.go).start()
    start = time.monotonic()
    refused = ""
    for _ in range(times):
        try:
            engine.reset_prefix_cache(running, True)
        except RuntimeError as error:
            refused = str(error)
    return {"seconds": time.monotonic() - start, "refused": refused}


# Aborts.


def state_of(engine: Any, name: str) -> str:
    """Where a request is: in the scheduler, and in the connector while it waits."""
    request = _core(engine).scheduler.requests.get(name)
    if request is None:
        return "gone"
    status = request.status.name
    if status == "WAITING":
        view = _scheduling(engine).manager.view(name)
        return f"waiting {view.phase.name.lower()}" if view is not None else "waiting"
    if status == "RUNNING":
        computed, asked = request.num_computed_tokens, request.num_prompt_tokens
        if computed < asked:
            return "prefill" if computed else "started"
        return "decode"
    return {"WAITING_FOR_REMOTE_KVS": "loading"}.get(status, status.lower())


def abort_in(engine: Any, arguments: list[Any]) -> dict[str, Any]:
    """[state, rounds, asked, filler, deadline_s]: brings a request into the state and aborts it there.

    `filler` (or None) is asked for before and decodes beside it, so that blocks are short. Returns in how
    many rounds the state was seen, and all states that were.
    """
    state, rounds, asked, filler, deadline_s = arguments
    seen: set[str] = set()
    hit = 0
    held = {"loading": "load", "storing": "store"}.get(state)
    _hold_at_once(state != "waiting pinning")
    for number in range(rounds):
        _run_out(engine, deadline_s)
        _core(engine).scheduler.reset_prefix_cache()
        if held:
            plane.entered.clear()
            plane.hold(held)  # type: ignore[arg-type]
        others = []
        if filler:
            others = [_add(engine, f"filler-{state}-{number}", filler)]
            _step_until(engine, lambda other=others[0]: state_of(engine, other) == "decode", deadline_s)
        tokens = asked
        if state in ("prefill", "storing") or (number % 2 and state in ("decode", "waiting asked")):
            # A head of its own: something to compute and to store, where others have something to load.
            tokens = [3 + (len(state) * 100 + number) % 1000, *asked]
        name = _add(engine, f"aborted-{state}-{number}", tokens)

        def there(name: str = name) -> bool:
            now = state_of(engine, name)
            seen.add(now)
            if state == "storing":
                return now == "decode" and plane.entered["store"] > 0
            return now == state

        hit += _step_until(
            engine, there, deadline_s, give_up=lambda name=name: state_of(engine, name) == "gone"
        )
        engine.abort_request([name, *others], internal=True)
        if number % 3 == 0:
            # A step while the copy still runs: the abort reaches the workers first.
            _step(engine)
        plane.go()
    _hold_at_once(True)
    _run_out(engine, deadline_s)
    return {"hit": hit, "seen": sorted(seen)}


def _hold_at_once(allowed: bool) -> None:
    """Whether hits may be held with a request's first answer from now on. Not for one in a long queue, which
    asks for its pins when its turn comes."""
    matching.HELD_PART = _HELD_PART if allowed else 1 << 60


def _add(engine: Any, name: str, tokens: list[int]) -> str:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, detokenize=False)
    ours: str = engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    return ours


def _step(engine: Any) -> None:
    if not engine.step():
        time.sleep(0.001)


def _step_until(
    engine: Any, condition: Callable[[], bool], deadline_s: float, give_up: Callable[[], bool] = lambda: False
) -> bool:
    until = time.monotonic() + deadline_s
    while not condition():
        if give_up():
            return False
        if time.monotonic() > until:
            return False
        _step(engine)
    return True


def _run_out(engine: Any, deadline_s: float) -> None:
    scheduler = _core(engine).scheduler
    until = time.monotonic() + deadline_s
    while scheduler.has_requests():
        if time.monotonic() > until:
            left = {name: state_of(engine, name) for name in scheduler.requests}
            raise TimeoutError(f"requests that do not end: {left}")
        _step(engine)
