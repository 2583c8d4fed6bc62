"""The TCP port as it was asked for: an address, and the files without which it is not opened."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads HOST:PORT or [IPV6]:PORT.

        Raises:
            ValueError: with a sentence.
        """
        host, colon, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        bad_ipv6 = ":" in host and bare is host
        if not colon or not bare or bad_ipv6 or not port.isdecimal() or int(port) > 65535:
            raise ValueError(
                f"{text!r} is not HOST:PORT; write it as in 10.0.0.5:9443 or [::1]:9443 (0.0.0.0 and [::] "
                "are every address of the host)"
            )
        return cls(bare, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Listener:
    """The address and the three PEM files that go with it.

    Args:
        cert: our certificate, followed by intermediate ones.
        key: its private key, not encrypted.
        client_ca: the authorities whose clients are served.
    """

    address: Address
    cert: Path
    key: Path
    client_ca: Path
