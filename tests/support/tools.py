"""Programs that tests need beside Python: where they are, or which package has them.

`.ci/run` installs them, and there a missing one is a failure. On a machine that has only what the README
asks for, the test is reported as not run, with the package's name.
"""

import os
import shutil
from typing import NoReturn

import pytest

PACKAGES = {
    "chroot": "coreutils",
    "debootstrap": "debootstrap",
    "kubectl": "kubectl (Debian: kubernetes-client)",
    "promtool": "prometheus",
    "setpriv": "util-linux",
    "strace": "strace",
    "systemd-analyze": "systemd",
    "systemd-sysusers": "systemd",
    "systemd-tmpfiles": "systemd",
    "unshare": "util-linux",
}


def tool(name: str) -> str:
    """The program's path. Without it the test ends here, as `missing` says."""
    found = shutil.which(name)
    if found is None:
        missing(f"this test needs {name}; install the package {PACKAGES[name]}")
    return found


def missing(why: str) -> NoReturn:
    """Ends a test that lacks a program: failed where CI is set in the environment, else not run."""
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)
