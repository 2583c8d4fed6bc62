"""Running a program, or a piece of code, as somebody else: a user without any capability."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.forks import fork_child

_REPOSITORY = Path(__file__).resolve().parents[2]

# Where the interpreter lives in a folder that only root may enter, a mount namespace of its own gets an empty
# folder in that place, with nothing in it but what the interpreter needs.
_ENTER = """
set -e
closed=$1 kept=$2
shift 2
if [ -n "$closed" ]; then
    mount -t tmpfs -o mode=755 none /mnt
    n=0
    for path in $kept; do n=$((n + 1)); mkdir "/mnt/$n"; mount --bind "$path" "/mnt/$n"; done
    for folder in $closed; do mount -t tmpfs -o mode=755 none "$folder"; done
    n=0
    for path in $kept; do n=$((n + 1)); mkdir -p "$path"; mount --bind "/mnt/$n" "$path"; done
fi
cd /
exec "$@"
"""


def as_user(uid: int, gid: int, groups: Sequence[int] = ()) -> list[str]:
    """The start of a command line that runs the rest as this user, with no capability left.

    Empty where we are not root: then we are such a user ourselves, under our own number.
    """
    if os.geteuid() != 0:
        return []
    needed = [Path(sys.base_prefix), Path(sys.prefix), _REPOSITORY]
    doors = {path: door for path in needed if (door := _closed_door(path)) is not None}
    closed, kept = (" ".join(sorted(set(map(str, part)))) for part in (doors.values(), doors))
    members = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    return [
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh", closed, kept),
        *("setpriv", "--reuid", str(uid), "--regid", str(gid), *members),
        *("--inh-caps", "-all", "--ambient-caps", "-all", "--bounding-set", "-all"),
    ]


def fork_as(uid: int, gid: int, work: Callable[[], object], groups: Sequence[int] = ()) -> int:
    """Starts `work` as this user in a forked child, which only root can; returns its pid."""

    def changed() -> None:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        work()

    return fork_child(changed)


def open_folder() -> Path:
    """A new folder that everybody may enter, unlike those that pytest makes. The caller removes it."""
    folder = Path(tempfile.mkdtemp(prefix="kvhost-open-", dir="/tmp"))
    folder.chmod(0o755)
    return folder


def _closed_door(path: Path) -> Path | None:
    """The outermost folder on the way to this one that others may not enter."""
    return next((f for f in reversed([path, *path.parents]) if not f.stat().st_mode & 0o001), None)
