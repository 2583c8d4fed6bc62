"""Replaying a Watch stream gives exactly the daemon's keys: under churn, resets, theft, and a slow reader."""

import random
import threading
from collections.abc import Iterator

import grpc
import pytest

from kvhost_client.admin import AdminClient
from kvhost_client.types import Chunk
from kvhost_proto.v1 import cache_pb2, cache_pb2_grpc
from tests.client.engine import Engine, key
from tests.support import Daemon, wait_for

ROUNDS = 60
KEYS = 400


class Router:
    """Indexes all namespaces by their events alone, in a thread of its own."""

    def __init__(self, daemon: Daemon) -> None:
        self.keys: dict[int, set[bytes]] = {}
        self.gaps = 0
        self.wrong: list[str] = []
        self.go = threading.Event()
        self._sequences: dict[int, int] = {}
        self._channel = grpc.insecure_channel(f"unix:{daemon.socket}")
        self._stream = cache_pb2_grpc.CacheStub(self._channel).Watch(cache_pb2.WatchRequest())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.go.set()
        self._stream.cancel()
        self._thread.join(10)
        self._channel.close()

    def _run(self) -> None:
        try:
            for event in self._stream:
                self.go.wait()
                self._apply(event)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                self.wrong.append(str(error))

    def _apply(self, event: cache_pb2.WatchEvent) -> None:
        number = event.namespace_number
        if event.sequence != self._sequences.get(number, 0) + 1:
            self.wrong.append(f"{event.sequence} follows {self._sequences.get(number)}")
        self._sequences[number] = event.sequence
        known = self.keys.setdefault(number, set())
        kind = event.WhichOneof("kind")
        if kind == "gap":
            self.gaps += 1
            known.clear()
        elif kind == "stored":
            known.update(_cut(event.stored))
        elif kind == "removed":
            known.difference_update(_cut(event.removed))


def _cut(told: cache_pb2.KeyList) -> list[bytes]:
    return [told.keys[at : at + told.key_bytes] for at in range(0, len(told.keys), told.key_bytes)]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("8MiB", ["--segment-size", "1MiB"]) as running:
        yield running


def name(model: str, number: int) -> bytes:
    return key(f"{model}-{number}")


def churn(daemon: Daemon, model: str, rounds: int, seed: int) -> None:
    """An engine that stores chains in a pool that is too small, while people evict and reset."""
    chance = random.Random(seed)
    with Engine(daemon.socket, model=model) as engine, AdminClient(daemon.socket) as admin:
        home = str(engine.declared.namespace_number)
        for _ in range(rounds):
            first = chance.randrange(KEYS)
            granted = engine.session.reserve(chance.randrange(1, 6)).grants
            names = [name(model, first + n) for n in range(len(granted))]
            for grant, one, parent in zip(granted, names, [b"", *names], strict=False):
                engine.session.commit(grant.store_id, Chunk(0, one, parent))
            if chance.random() < 0.2:
                admin.evict([name(model, chance.randrange(KEYS)).hex() for _ in range(20)], home)
            if chance.random() < 0.03:
                admin.reset(home)


def stored(daemon: Daemon, models: dict[str, int]) -> dict[int, set[bytes]]:
    """What the daemon itself says is there."""
    there: dict[int, set[bytes]] = {}
    with AdminClient(daemon.socket) as admin:
        for model, number in models.items():
            every = [name(model, n) for n in range(KEYS + 6)]
            chunks = admin.lookup([one.hex() for one in every], str(number))
            there[number] = {one for one, chunk in zip(every, chunks, strict=True) if chunk.state == "ready"}
    return there


@pytest.mark.parametrize("slow", [False, True])
def test_replaying_gives_exactly_what_is_stored(daemon: Daemon, slow: bool) -> None:
    router = Router(daemon)
    if not slow:
        router.go.set()
    errors: list[BaseException] = []

    def work(model: str, seed: int) -> None:
        try:
            churn(daemon, model, ROUNDS, seed)
        except BaseException as error:
            errors.append(error)

    engines = [threading.Thread(target=work, args=(model, seed)) for seed, model in enumerate("abc")]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join(60)
    assert not errors
    router.go.set()
    models = {one.model: one.number for one in daemon.status().namespaces}
    there = stored(daemon, models)
    assert sum(map(len, there.values())) > 20
    wait_for(
        lambda: {number: router.keys.get(number, set()) for number in there} == there,
        20.0,
        "the router to know what is stored",
    )
    assert daemon.status().counters["evicted_chunks"] > 20
    router.close()
    assert router.wrong == []
    daemon.check_integrity()
