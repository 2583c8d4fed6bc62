"""Orders of eviction: which chunk leaves next."""

from kvhost_server.policies.adaptive import Adaptive
from kvhost_server.policies.base import Candidates, Policy
from kvhost_server.policies.lru import LeastRecentlyUsed

DEFAULT_POLICY = Adaptive.name

POLICIES: dict[str, type[LeastRecentlyUsed]] = {kind.name: kind for kind in (Adaptive, LeastRecentlyUsed)}
"""By the names that `--policy` takes."""

__all__ = ["DEFAULT_POLICY", "POLICIES", "Candidates", "Policy"]
