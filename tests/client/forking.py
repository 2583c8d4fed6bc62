"""Run as a program: forks while a session and a mapping are open, and prints what child and parent find."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from collections.abc import Callable

from kvhost_client.errors import KVHostError
from tests.client.engine import Engine, key, keys, prefix
from tests.support import map_count, thread_count


def sockets_to(folder: str) -> list[str]:
    """Names of the Unix sockets in this folder to which this process is connected."""
    names = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            one = socket.socket(fileno=number)
        except OSError:
            continue
        try:
            name = one.getpeername()
        except OSError:
            name = ""
        finally:
            one.detach()
        if isinstance(name, str) and name.startswith(folder):
            names.append(os.path.basename(name))
    return sorted(names)


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except KVHostError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def look(engine: Engine, folder: str) -> dict[str, object]:
    """What this process has of the engine."""
    worker, session = engine.workers[0], engine.session
    return {
        "sockets": sockets_to(folder),
        "maps": map_count(os.getpid(), "memfd:kvhost"),
        "threads": thread_count(os.getpid()),
        "mapping": worker.mapping is not None,
        "token": len(worker.token),
        "ended": session.ended,
        "end_reason": session.end_reason,
    }


def child(engine: Engine, folder: str) -> dict[str, object]:
    mapping, session = engine.workers[0]._mapping, engine.session
    assert mapping is not None
    return {
        **look(engine, folder),
        "begin": bool(mapping.begin(session.number)),
        "shard": refusal(lambda: mapping.shard(1 << 32, 0)),
        "lookup": refusal(lambda: session.lookup([prefix(keys("a", 1))], pin=True)),
        "reserve": refusal(lambda: session.reserve(1)),
        "closed": [engine.workers[0].close(), refusal(session.close)],
    }


def main() -> None:
    socket_path, ending = sys.argv[1:]
    folder = os.path.dirname(socket_path)
    engine = Engine(socket_path)
    engine.store(keys("a", 2))
    before = look(engine, folder)
    copy = engine.mapping.begin(engine.session.number)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            json.dump(child(engine, folder), pipe)
        if ending == "exit":
            sys.exit(0)  # with everything that an interpreter does at its end
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        of_child = json.load(pipe)
    _, status = os.waitpid(pid, 0)
    engine.mapping.end(copy)
    engine.store([key("b")])
    wrong = engine.wrong_bytes([*keys("a", 2)]) + engine.wrong_bytes([key("b")])
    after = look(engine, folder)
    engine.close()
    answer = {"before": before, "child": of_child, "after": after, "wrong": wrong}
    print(json.dumps({**answer, "child_exit": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main()
