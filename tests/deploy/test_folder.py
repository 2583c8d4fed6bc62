"""The folder of the sockets, mounted as containers do: read-only, over restarts of the daemon (F9)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import Daemon
from tests.support.tools import tool

# Lives in a mount namespace of its own and, for each line it reads, asks through the mount.
_CONTAINER = """
mount --bind "$1" "$2" && mount -o remount,ro,bind "$2" || exit 1
while read -r line; do
    "$3" -m kvhost_client.ctl --socket "$2/kvhostd.sock" health 2>&1
    touch "$2/other.sock" 2>/dev/null && echo written
    echo .
done
"""


def test_a_container_that_mounts_the_folder_read_only_finds_every_daemon_in_it(tmp_path: Path) -> None:
    folder, mounted = tmp_path / "run", tmp_path / "mounted"
    folder.mkdir()
    mounted.mkdir()
    container = subprocess.Popen(
        [
            *(tool("unshare"), "--mount", "--propagation", "private", "sh", "-c", _CONTAINER, "sh"),
            *(str(folder), str(mounted), sys.executable),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert container.stdin is not None
    assert container.stdout is not None

    def ask() -> list[str]:
        print("health", file=container.stdin, flush=True)
        said = []
        for line in iter(container.stdout.readline, ".\n"):  # type: ignore[union-attr]
            assert line, "the container has ended"
            said.append(line.strip())
        return said

    with container:
        for end in (Daemon.stop, Daemon.kill, Daemon.stop):
            with Daemon("4MiB", folder=folder) as daemon:
                assert ask() == ["SERVING"]
                end(daemon)
            [refusal] = ask()
            assert refusal.startswith("kvhostctl: ")
        container.stdin.close()
    assert container.returncode == 0
