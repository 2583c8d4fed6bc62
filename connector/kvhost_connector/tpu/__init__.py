"""kvhost's connector for tpu-inference: the bytes of the KV cache are moved by JAX.

The platform accepts connectors by name only, so the class is called TPUOffloadConnector here too. Importing
this package does nothing: neither JAX nor vLLM is imported before somebody asks for the class.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhost_connector.tpu.connector import TPUOffloadConnector

__all__ = ["TPUOffloadConnector"]


def __getattr__(name: str) -> Any:
    if name == "TPUOffloadConnector":
        from kvhost_connector.tpu.connector import TPUOffloadConnector

        return TPUOffloadConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
