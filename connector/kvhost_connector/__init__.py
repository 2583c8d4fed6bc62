"""kvhost's connector: what a vLLM engine loads to keep its KV cache in kvhostd.

Importing this package does nothing: no socket, no thread, no vLLM. The connector class is imported when
somebody asks for it, because vLLM imports the package in its API server, engine core and every worker, and
may fork between them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost_connector.connector import KVHostConnector

__all__ = ["KVHostConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == "KVHostConnector":
        from kvhost_connector.connector import KVHostConnector

        return KVHostConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Makes `"kv_connector": "KVHostConnector"` known to vLLM; the `vllm.general_plugins` entry point.

    vLLM calls it in each of its processes, possibly more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVHostConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVHostConnector", "kvhost_connector.connector", "KVHostConnector"
        )
