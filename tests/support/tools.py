"""Programs that tests need beside Python: where they are, or which package has them."""

import shutil

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
    """The program's path.

    Raises:
        AssertionError: it is not installed; names the package.
    """
    found = shutil.which(name)
    assert found is not None, f"this test needs {name}; install the package {PACKAGES[name]}"
    return found
