"""What runs in the processes of a drill: the production client, told over a socket what to do.

An actor is a scheduler, a worker, or a whole engine in one process, depending on what it is told first.
Messages are JSON: `[verb, arguments]` in, `[error class or "", value]` out. Names of chunks are plain text;
`key` makes keys of them, and the bytes of a chunk are the pattern of its key.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from kvhost_client.mapping import WorkerMapping
from kvhost_client.session import Session
from kvhost_client.types import Abort, ChainQuery, Chunk, Query, Semantics, StoreOf
from kvhost_client.worker import WorkerLink
from tests.client.engine import Engine, key, spec
from tests.drills import loops
from tests.support import fork_child, map_count, pat, wait_for

_LARGEST_REQUEST = 1 << 20
_QUIET_SIGNALS = (signal.SIGKILL,)


class Actor:
    """The verbs. Each public method is one; what it returns goes back as JSON."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._worker: WorkerLink | None = None
        self._rank = 0
        self._engine: Engine | None = None
        self._loop: loops.Loop | None = None
        self._copy: tuple[WorkerMapping, Any, int, bytes, int] | None = None
        self.ends: list[str] = []

    # A scheduler.

    def open(self, socket: str, instance: str, model: str, ranks: int = 1, tokens: Sequence[str] = ()) -> int:
        """Opens a session and declares the namespace; returns the session's number."""
        self._session = Session.open(
            socket,
            instance_id=bytes.fromhex(instance),
            label=f"drill pid {os.getpid()}",
            deadline_s=5.0,
            on_end=self.ends.append,
        )
        self._session.declare(
            spec(model, ranks, ranks), {rank: bytes.fromhex(t) for rank, t in enumerate(tokens)}
        )
        return self._session.number

    def lookup(self, names: Sequence[str], deadline_s: float | None = None) -> int:
        """How many chunks of this chain are there."""
        (answer,) = self.session.lookup([_prefix(names)], False, deadline_s)
        return answer.chains[0].hits

    def pin(self, names: Sequence[str], deadline_s: float | None = None) -> list[tuple[int, int]]:
        """Pins the chain as far as it is there: (pin id, slot) of each."""
        (answer,) = self.session.lookup([_prefix(names)], True, deadline_s)
        (chain,) = answer.chains
        return list(zip(chain.pin_ids, chain.slots, strict=True))

    def reserve(self, names: Sequence[str], deadline_s: float | None = None) -> dict[str, Any]:
        """A slot for each chunk of this chain: status, store id and slot of each, and the reason."""
        reserved = self.session.reserve(0, _chunks(names), deadline_s)
        return {
            "chunks": [(int(c.status), c.store_id, c.slot) for c in reserved.chunks],
            "pending": reserved.pending,
            "reason": reserved.reason,
        }

    def take(self, count: int, deadline_s: float | None = None) -> list[tuple[int, int]]:
        """Slots ahead of need: (store id, slot) of each."""
        grants = self.session.reserve(count, (), deadline_s).grants
        return [(grant.store_id, grant.slot) for grant in grants]

    def update(
        self,
        *,
        names: Sequence[str] = (),
        assigns: Sequence[int] = (),
        commits: Sequence[int] = (),
        aborts: Sequence[int] = (),
        unquiet: Sequence[int] = (),
        releases: Sequence[int] = (),
        deadline_s: float | None = None,
    ) -> list[tuple[str, int, int]]:
        """One update; the stores of `assigns` and `commits` are of the chunks of the chain `names`, in order.

        Returns kind, id and status code of each error.
        """
        chunks = _chunks(names)
        result = self.session.update(
            assigns=[StoreOf(store, chunk) for store, chunk in zip(assigns, chunks, strict=False)],
            commits=[StoreOf(store, chunk) for store, chunk in zip(commits, chunks, strict=False)],
            aborts=[Abort(store, unquiet) for store in aborts],
            releases=releases,
            deadline_s=deadline_s,
        )
        return [(error.kind.name, error.id, error.code) for error in result.errors]

    def reset(self, weights: str = "") -> int:
        """Moves to a fresh namespace; returns its number."""
        return self.session.reset(weights).namespace_number

    def close_session(self) -> None:
        self.session.close()

    def ended(self) -> str:
        """Why the session is over; empty while it is not."""
        return self.session.end_reason

    @property
    def session(self) -> Session:
        assert self._session is not None, "no session was opened"
        return self._session

    # A worker.

    def attach(self, socket: str, instance: str, rank: int = 0) -> str:
        """Starts the link of one rank; returns its token."""
        self._rank = rank
        self._worker = WorkerLink(socket, bytes.fromhex(instance), rank)
        self._worker.start()
        return self._worker.token.hex()

    def token(self) -> str:
        assert self._worker is not None
        return self._worker.token.hex()

    def problem(self) -> str:
        """Why there is no mapping."""
        assert self._worker is not None
        return self._worker.problem

    def mapped(self, deadline_s: float = 5.0) -> list[int]:
        """Waits for a mapping; returns its segment ids."""
        return sorted(wait_for(self._mapping_now, deadline_s, "a mapping").segment_ids)

    def begin(
        self, session: int, slot: int, name: str, stores: Sequence[int] = (), part: float = 0.5
    ) -> bool:
        """Begins to copy a chunk into (with `stores`) or out of a slot, and does a part of it.

        False when the mapping refuses the copy.
        """
        mapping = self.mapping
        copy = mapping.begin(session, stores)
        if not copy:
            return False
        address, nbytes = mapping.shard(slot, self._rank)
        self._copy = (mapping, copy, address, key(name), nbytes)
        self._bytes = b""
        self._at = 0
        self._storing = bool(stores)
        self._go_to(int(nbytes * part) // 8 * 8)
        return True

    def finish(self) -> bool:
        """Does the rest of the copy that was begun, and ends it. False when the bytes are not the key's."""
        assert self._copy is not None, "no copy was begun"
        mapping, copy, _, name, nbytes = self._copy
        self._go_to(nbytes)
        mapping.end(copy)
        self._copy = None
        return self._storing or self._bytes == pat(name, self._rank, nbytes)

    def copy(self, session: int, slot: int, name: str, stores: Sequence[int] = ()) -> bool:
        """A whole copy. False when it is refused, or when the bytes read are not the key's."""
        return self.begin(session, slot, name, stores) and self.finish()

    def refuses(self, session: int, stores: Sequence[int] = ()) -> bool:
        """The mapping lets no copy of this session (or these stores) begin any more."""
        mapping = self._mapping_now()
        copy = None if mapping is None else mapping.begin(session, stores)
        if mapping is not None and copy:
            mapping.end(copy)
        return not copy

    def scribble(self, slot: int, name: str) -> None:
        """Writes as a worker that asks nobody: no begin, no fence."""
        address, nbytes = self.mapping.shard(slot, self._rank)
        ctypes.memmove(address, pat(key(name), self._rank, nbytes), nbytes)

    def detach(self) -> bool:
        """Ends the worker as an engine that ends well."""
        assert self._worker is not None
        return self._worker.close()

    @property
    def mapping(self) -> WorkerMapping:
        mapping = self._mapping_now()
        assert mapping is not None, self._worker.problem if self._worker else "no worker"
        return mapping

    def _mapping_now(self) -> WorkerMapping | None:
        if self._engine is not None:
            return self._engine.workers[self._rank].mapping
        assert self._worker is not None, "no worker was attached"
        return self._worker.mapping

    def _go_to(self, end: int) -> None:
        assert self._copy is not None
        _, _, address, name, nbytes = self._copy
        if self._storing:
            ctypes.memmove(address + self._at, pat(name, self._rank, nbytes)[self._at : end], end - self._at)
        else:
            self._bytes += ctypes.string_at(address + self._at, end - self._at)
        self._at = end

    # An engine in one process.

    def engine(self, socket: str, model: str = "test", ready: bool = True) -> int:
        """Attaches; returns the session's number."""
        self._engine = Engine(socket, model=model, ready=ready)
        self._session = self._engine.session
        return self._session.number

    def instance(self) -> str:
        assert self._engine is not None
        return self._engine.instance_id.hex()

    def declared_slots(self) -> int:
        """What the namespace could grow to."""
        assert self._engine is not None
        return self._engine.declared.slots

    def store(self, names: Sequence[str]) -> int:
        """Stores a chain, chunk after chunk; how many of it there was room for."""
        assert self._engine is not None
        return loops.store_chain(self._engine, names)

    def wrong(self, names: Sequence[str]) -> list[str]:
        """Names of the chain whose chunk is absent or has other bytes."""
        assert self._engine is not None
        wrong = set(self._engine.wrong_bytes([key(name) for name in names]))
        return [name for name in names if key(name).hex() in wrong]

    def loop(self, kind: str, **args: Any) -> None:
        """Starts a loop of `loops` on a thread of its own."""
        kinds: dict[str, type[loops.Loop]] = {
            "store": loops.Storing,
            "read": loops.Reading,
            "mixed": loops.Mixed,
            "linked": loops.Linked,
        }
        self._loop = kinds[kind](self._engine, **args)
        self._loop.start()

    def report(self) -> dict[str, Any]:
        """What the loop has done so far. Raises what ended it."""
        assert self._loop is not None
        return self._loop.report()

    def end_loop(self) -> dict[str, Any]:
        """Ends the loop and returns its last report."""
        assert self._loop is not None
        self._loop.end()
        return self._loop.report()

    def loop_does(self, what: str) -> Any:
        """Calls a method of the loop."""
        return getattr(self._loop, what)()

    def close_engine(self) -> None:
        assert self._engine is not None
        self._engine.close()

    # The process.

    def fork(self) -> int:
        """Forks a child that inherits everything and does nothing, for ever; returns its pid."""
        return fork_child(lambda: threading.Event().wait())

    def limit_files(self, spare: int = 3) -> None:
        """From now on so many more files can be opened, and no more."""
        limit = len(os.listdir("/proc/self/fd")) + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    def maps(self) -> int:
        """Segments mapped by this process, as the kernel sees it."""
        return map_count(os.getpid(), "memfd:kvhost")

    def serve(self, line: socket.socket) -> None:
        """Does what it is told until the other end is gone."""
        while data := line.recv(_LARGEST_REQUEST):
            verb, args = json.loads(data)
            try:
                answer = ["", getattr(self, verb)(**args)]
            except Exception as error:
                answer = [type(error).__name__, f"{error}\n{traceback.format_exc()}"]
            line.send(json.dumps(answer).encode())


def _prefix(names: Sequence[str]) -> Query:
    return Query(0, [ChainQuery(0, Semantics.PREFIX, [key(name) for name in names])])


def _chunks(names: Sequence[str]) -> list[Chunk]:
    keys = [key(name) for name in names]
    return [Chunk(0, own, parent) for own, parent in zip(keys, [b"", *keys], strict=False)]


def main() -> int:
    """The stage: forks an actor for every byte on the control socket, with the descriptor that came along."""
    control = socket.socket(fileno=int(sys.argv[1]))
    crashed: list[str] = []

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) not in _QUIET_SIGNALS:
                    crashed.append(f"actor {ended[0]} ended by signal {os.WTERMSIG(ended[1])}")

    signal.signal(signal.SIGCHLD, reap)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _act(descriptors[0])
        os.close(descriptors[0])
        control.send(str(pid).encode())
    reap()
    print("\n".join(crashed), end="", file=sys.stderr)
    return 1 if crashed else 0


def _act(descriptor: int) -> None:
    code = 1
    try:
        with socket.socket(fileno=descriptor) as line:
            Actor().serve(line)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
