"""The socket files: one daemon a path, right mode and group from the first moment, none left behind (F6, F8).

gRPC binds its Unix sockets itself and would silently take a path from a living daemon; so a lock file beside
the socket decides who may bind, and is never removed (a removed lock file could be locked twice).
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from kvhost_server.exits import ExitCode, StartupError

LONGEST_PATH = 107
"""Bytes of a Unix socket's path: sun_path less the final zero."""
_LOCK_MODE = 0o644
_FOLDER_MODE = 0o750
_PASSABLE = 0o001
_ANYBODY_WRITES = stat.S_IWOTH
_NOBODY_YET = 0o177
"""umask under which a socket is made: only we may connect until its group is set."""

log = logging.getLogger(__name__)


class SocketLock:
    """The right to serve at one path, held until `release` or the end of the process.

    Raises:
        StartupError: another daemon holds it, or the lock file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        lock = path.with_name(path.name + ".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd: int | None = os.open(lock, flags, _LOCK_MODE)
        except OSError as error:
            raise _unavailable(f"the lock file {lock} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            if error.errno != errno.EWOULDBLOCK:
                raise _unavailable(f"the lock file {lock} cannot be locked: {error.strerror}") from error
            raise _unavailable(
                f"already running, pid {holder}, on --socket {path}; stop it, or choose another --socket"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets another daemon serve here. A second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SocketFile:
    """One socket path of this daemon: made ready before binding, given mode and group after, removed at
    the end.

    Args:
        path: absolute.
        mode: permission bits, as 0o660.
        gid: group to own it; None leaves our own.
    """

    def __init__(self, path: Path, mode: int, gid: int | None) -> None:
        self.path = path
        self._mode = mode
        self._gid = gid
        self._inode: int | None = None

    @property
    def grpc_target(self) -> str:
        """The path as gRPC reads it: a URI, where %, ? and # mean something else."""
        return "unix:" + quote(str(self.path))

    def prepare(self, *, passable: bool = False) -> None:
        """Makes the folder if only that is missing. To be called before the lock is taken.

        Args:
            passable: who is not of the folder's group may pass through it, to a socket of another group,
                without seeing what is in it.

        Raises:
            StartupError: the path is too long, or its folder cannot be made.
        """
        length = len(os.fsencode(self.path))
        if length > LONGEST_PATH:
            raise StartupError(
                f"the socket path {self.path} has {length} bytes and at most {LONGEST_PATH} are allowed; "
                "choose a shorter one",
                ExitCode.USAGE,
            )
        folder = self.path.parent
        if folder.is_dir():
            mode = folder.stat().st_mode
            if mode & _ANYBODY_WRITES and not mode & stat.S_ISVTX:
                log.warning(
                    "every user may write into %s (mode %04o) and put another socket in the place of %s; "
                    "take that right away (chmod o-w), or choose another path",
                    folder,
                    stat.S_IMODE(mode),
                    self.path.name,
                )
            return
        try:
            folder.mkdir(0o700)
            if self._gid is not None:
                os.chown(folder, -1, self._gid)
            folder.chmod(_FOLDER_MODE | _PASSABLE if passable else _FOLDER_MODE)
        except FileExistsError as error:
            raise _unavailable(f"{folder}, the folder of socket {self.path.name}, is no directory") from error
        except OSError as error:
            raise _unavailable(
                f"the folder {folder} of socket {self.path.name} does not exist and cannot be made: "
                f"{error.strerror}; make it, or choose another path"
            ) from error

    def clear(self) -> None:
        """Removes a socket that a dead daemon left. To be called with the lock held.

        Raises:
            StartupError: somebody listens there, or it is no socket.
        """
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unavailable(f"the socket {self.path} cannot be looked at: {error.strerror}") from error
        if not stat.S_ISSOCK(found.st_mode):
            raise _unavailable(f"{self.path} exists and is no socket; remove it, or choose another path")
        if _somebody_listens(self.path):
            raise _unavailable(f"another process listens on {self.path}; stop it, or choose another path")
        try:
            self.path.unlink()
        except OSError as error:
            raise _unavailable(f"the stale socket {self.path} cannot be removed: {error.strerror}") from error

    def bind(self, bind: Callable[[], object]) -> None:
        """Runs `bind`, which makes the socket file, and gives it group and mode.

        The umask is the process's: nothing else may make files meanwhile, and nothing does at start-up.

        Raises:
            StartupError: binding, chown or chmod failed; the file is gone again.
        """
        before = os.umask(_NOBODY_YET)
        try:
            bind()
        except (OSError, RuntimeError) as error:  # gRPC raises RuntimeError, and gives no reason
            reason = getattr(error, "strerror", None) or "may we write into its folder?"
            raise _unavailable(f"the socket {self.path} cannot be made: {reason}") from error
        finally:
            os.umask(before)
        self._inode = os.stat(self.path).st_ino
        try:
            if self._gid is not None:
                os.chown(self.path, -1, self._gid)
            os.chmod(self.path, self._mode)
        except OSError as error:
            self.remove()
            raise _unavailable(
                f"the socket {self.path} cannot be given to group {self._gid}: {error.strerror}; be a "
                "member of "
                "that group, or choose another"
            ) from error

    def remove(self) -> None:
        """Removes the file if it is still the one we made."""
        with contextlib.suppress(FileNotFoundError):  # gRPC removes its sockets itself when it stops
            if self._inode is not None and os.lstat(self.path).st_ino == self._inode:
                self.path.unlink()
        self._inode = None


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # another kind of socket, a full queue, no permission: somebody's anyway
    return True


def _unavailable(message: str) -> StartupError:
    return StartupError(message, ExitCode.UNAVAILABLE)
