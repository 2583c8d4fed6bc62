"""Lookups of 1 to 8192 hashes through the client, beside round trips that do nothing; and what a scheduler
sees of a lookup whose answer came before it asked.

By itself: `python -m benchmarks.lookup [--full]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from queue import SimpleQueue

import grpc

from benchmarks.alone import run_alone
from benchmarks.report import Plot, Report, Table
from benchmarks.scale import Scale, in_turns
from benchmarks.small import Engine, chain, keys, small_slots
from kvhost_client.types import Found
from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc

SIZES = (1, 64, 1024, 8192)
_STORED = 8192
_SETTLE = 50
_PER_ROUND = {1: 300, 64: 300, 1024: 100, 8192: 25}


def measure(scale: Scale, report: Report) -> None:
    rounds = scale.rounds * (3 if scale.full else 1)
    names = keys(0, _STORED)
    with small_slots(4 * _STORED) as daemon, Engine(daemon.socket) as engine:
        engine.store(0, _STORED)
        session = engine.session
        questions = {size: [chain(names[:size])] for size in SIZES}
        channel = session._connection.channel
        ping = cache_pb2_grpc.CacheStub(channel).Ping
        nothing = iter(_nothing(channel))
        sides: dict[str, Callable[[], object]] = {
            "call": lambda: ping(cache_pb2.PingRequest()),
            "message": lambda: next(nothing),
        }
        for size in SIZES:
            sides[str(size)] = lambda asked=questions[size]: session.lookup(asked)  # type: ignore[misc]
        for side in sides.values():
            _times(side, _SETTLE)
        (answer,) = session.lookup(questions[_STORED])
        if answer.chains[0].hits != _STORED:
            raise RuntimeError(f"{answer.chains[0].hits} of {_STORED} chunks were found")
        times: dict[str, list[float]] = {name: [] for name in sides}
        medians: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in in_turns(sides, number):
                took = _times(sides[name], _PER_ROUND.get(int(name) if name.isdigit() else 1, 100))
                times[name] += took
                medians[name].append(_share(took, 0.5))
    _report(report, times, medians)
    _local(report, names)


def _report(report: Report, times: dict[str, list[float]], medians: dict[str, list[float]]) -> None:
    report.figure("lookup_8192_ms", [1e3 * t for t in medians["8192"]], "ms", "median round trip, all found")
    report.figure(
        "lookup_1_vs_noop",
        [one / none for one, none in zip(medians["1"], medians["call"], strict=True)],
        note="one hash through the client / a Ping call, made with gRPC alone, on the same channel",
    )
    report.figure(
        "lookup_1_vs_noop_message",
        [one / none for one, none in zip(medians["1"], medians["message"], strict=True)],
        note="the same / an empty message and its reply on a stream of its own, with gRPC alone",
    )
    labels = {"call": "a call that does nothing", "message": "a message that does nothing"}
    report.table(
        "lookup",
        Table(
            "Lookup through the client, round trip",
            ("hashes", "p50 ms", "p99 ms", "least ms", "ns a hash"),
            [
                (
                    labels.get(name, name),
                    f"{_share(took, 0.5) * 1e3:.3f}",
                    f"{_share(took, 0.99) * 1e3:.3f}",
                    f"{min(took) * 1e3:.3f}",
                    f"{_share(took, 0.5) * 1e9 / int(name):.0f}" if name.isdigit() else "",
                )
                for name, took in times.items()
            ],
        ),
    )
    lines = {
        label: [(size, _share(times[str(size)], share) * 1e3) for size in SIZES]
        for label, share in (("p50", 0.5), ("p99", 0.99))
    }
    lines["Ping call, p50"] = [(size, _share(times["call"], 0.5) * 1e3) for size in SIZES]
    report.plot("lookup", Plot("Lookup through the client", "hashes", "round trip, ms", lines, log_x=True))


def _local(report: Report, names: list[bytes]) -> None:
    """What the engine's thread does when the answer is there already: it looks into a dictionary."""
    found = dict.fromkeys(names, int(Found.HIT))
    ask = found.get
    each = []
    for _ in range(200):
        began = time.perf_counter()
        for name in names[:64]:
            ask(name)
        each.append((time.perf_counter() - began) / 64)
    report.figure(
        "lookup_prefetched_ns",
        _share(each, 0.5) * 1e9,
        "ns a hash",
        "a look into the answers that came ahead",
    )


def _nothing(channel: grpc.Channel) -> Iterator[object]:
    """Empty messages and their replies, each sent when its reply is asked for."""
    questions: SimpleQueue[cache_pb2.ExchangeRequest | None] = SimpleQueue()
    replies = cache_pb2_grpc.CacheStub(channel).Exchange(iter(questions.get, None))
    for number in count(1):
        questions.put(cache_pb2.ExchangeRequest(id=number))
        yield next(replies)


def _times(side: Callable[[], object], repeat: int) -> list[float]:
    took = []
    for _ in range(repeat):
        began = time.perf_counter()
        side()
        took.append(time.perf_counter() - began)
    return took


def _share(took: list[float], share: float) -> float:
    """The time below which this share of them lies."""
    return sorted(took)[min(len(took) - 1, int(share * len(took)))]


if __name__ == "__main__":
    run_alone(measure)
