"""Which protocol this client speaks, and how it names itself to people."""

from importlib import metadata

from kvhost_client.errors import VersionMismatch
from kvhost_proto.v1 import common_pb2

MAJOR = 1
MINOR = 1


def program() -> str:
    """The program for people, as "kvhost 0.1.0"."""
    try:
        return f"kvhost {metadata.version('kvhost')}"
    except metadata.PackageNotFoundError:
        return "kvhost (not installed)"


def own() -> common_pb2.Version:
    """What every first message of this client carries."""
    return common_pb2.Version(major=MAJOR, minor=MINOR, program=program())


def check(peer: common_pb2.Version, where: str) -> None:
    """Raises `VersionMismatch` unless the daemon at `where` speaks our major version.

    A daemon that names no version at all (major 0) is as foreign as a newer one.
    """
    if peer.major != MAJOR:
        raise VersionMismatch(
            f"{where} speaks kvhost protocol {peer.major}.{peer.minor} ({peer.program or 'no name'}), "
            f"this client {MAJOR}.{MINOR} ({program()}): install the same kvhost major version on both sides"
        )
