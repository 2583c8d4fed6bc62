"""Versions of the program and of the protocol it speaks."""

from kvhost_proto.v1 import common_pb2

PROGRAM_VERSION = "0.1.0"
PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1


def version_message() -> common_pb2.Version:
    return common_pb2.Version(
        major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR, program=f"kvhostd {PROGRAM_VERSION}"
    )
