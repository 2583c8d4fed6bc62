"""Everything that can go wrong between an engine and kvhostd, each with its own type and a whole sentence.

An engine treats all of them alike: it computes instead (I8). The types tell a breaker whether the daemon
answered, and a person what to do.
"""


class KVHostError(Exception):
    """Base of all errors of this package."""


class Unavailable(KVHostError):
    """Nobody answers: the daemon is not running, or it went away during the call."""


class NotServing(Unavailable):
    """The daemon answers, but grants nothing at present: it is starting, or draining."""


class BreakerOpen(Unavailable):
    """Not asked, because the daemon failed a moment ago."""


class DeadlineExceeded(KVHostError):
    """No answer in time. A call that changes something may still take effect later."""


class SessionEnded(KVHostError):
    """The session is over: its grants and pins are gone. Open another one."""


class Refused(KVHostError):
    """The daemon does not want this client, or this call; asking again changes nothing.

    `code` is the gRPC status code it gave.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class NotKVHost(KVHostError):
    """Something answers at this address, but it is not kvhostd."""


class VersionMismatch(KVHostError):
    """The daemon speaks another major version of the protocol."""


class InvalidArgument(KVHostError):
    """The daemon (or this client, before it asked) found the request malformed."""


class NotFound(KVHostError):
    """What the call names does not exist."""


class FailedPrecondition(KVHostError):
    """The call is right, but not in this state: no namespace was declared yet, for instance."""


class StaleStore(KVHostError):
    """The store id is not ours, is used up, or its grant was taken back (I5). Nothing was changed."""


class NotHeld(KVHostError):
    """A pin id that this session does not hold. Nothing was changed by it (I5)."""


class HandoverFailed(KVHostError):
    """The handover socket broke its own rules, or the segments it gave cannot be mapped."""


class BadReply(KVHostError):
    """The daemon's answer does not fit the question. The session is ended: what it holds goes back."""


class NotMapped(KVHostError):
    """A slot or rank outside what this process has mapped. No byte may be touched there (I6, I13)."""
