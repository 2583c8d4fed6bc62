"""A forked child has nothing of its parent's: no connection, no mapping, no say (I7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import Daemon, wait_for

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("ending", ["exit", "_exit"])
@pytest.mark.parametrize("grpc_support", ["0", "1", ""])
def test_a_forked_child_has_nothing(daemon: Daemon, grpc_support: str, ending: str) -> None:
    env = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": grpc_support}
    if not grpc_support:
        del env["GRPC_ENABLE_FORK_SUPPORT"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.client.forking", daemon.socket, ending],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["child_exit"] == 0, done.stderr
    assert found["before"]["sockets"] == ["kvhostd-handover.sock", "kvhostd.sock"]
    assert found["before"]["maps"] > 0

    child = found["child"]
    assert child["sockets"] == []
    assert child["maps"] == 0
    assert (child["mapping"], child["token"], child["begin"]) == (False, 0, False)
    assert child["ended"]
    assert "forked child" in child["end_reason"]
    assert child["shard"].startswith("NotMapped")
    assert child["lookup"].startswith("SessionEnded")
    assert child["reserve"].startswith("SessionEnded")
    assert child["closed"] == [True, "no error"]

    assert found["wrong"] == [], "the parent goes on as before"
    assert found["after"]["sockets"] == found["before"]["sockets"]
    wait_for(lambda: not daemon.status().sessions, what="the parent's session to end")
    daemon.check_integrity()


def test_a_fork_waits_for_a_descriptor_that_nobody_owns_yet() -> None:
    """Forks beside a worker that maps segment after segment: no child ever has a memory file open."""
    program = """
import os, sys, threading
from pathlib import Path
import tempfile
from kvhost_client.worker import WorkerLink
from tests.client.fakes import FakeHandover
with FakeHandover(Path(tempfile.mkdtemp())) as server:
    link = WorkerLink(server.socket, bytes(16), 0)
    link.start()
    peer = server.accept()
    peer.expect("hello")
    peer.welcome()
    done = threading.Event()
    def feed():
        for number in range(1, 1500):
            files = peer.segments(number, number + 10000, slots=1, slot_bytes=4096, nbytes=4096, shards=1)
            for file in files:
                os.set_inheritable(file, False)
                os.close(file)
            peer.expect("mapped")
        done.set()
    # The feeder's own files must not be counted: it runs in another process.
    feeder = os.fork()
    if feeder == 0:
        feed()
        os._exit(0)
    leaks = forks = 0
    while os.waitpid(feeder, os.WNOHANG) == (0, 0):
        pid = os.fork()
        if pid == 0:
            folder = "/proc/self/fd/"
            names = [os.readlink(folder + n) for n in os.listdir(folder) if os.path.lexists(folder + n)]
            os._exit(sum("memfd" in name for name in names))
        leaks += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        forks += 1
    print(leaks, forks, len(link.mapping.segment_ids))
    link.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    leaks, forks, mapped = map(int, done.stdout.split())
    assert mapped == 2 * 1499
    assert forks > 5
    assert leaks == 0
