"""What the manager refuses, as sentences with a gRPC status code."""

from enum import IntEnum


class Code(IntEnum):
    """The gRPC status codes that kvhost uses."""

    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Refused(Exception):
    """A call that changes nothing. The message says what was asked, what was found, what is allowed."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
