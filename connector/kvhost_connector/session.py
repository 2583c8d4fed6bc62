"""The part of kvhost_client's Session that the scheduler half needs, so that tests can stand in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from kvhost_client.types import (
    Abort,
    Answer,
    ChainQuery,
    Query,
    Rebased,
    Reserved,
    ServiceState,
    StoreOf,
    Updated,
)


class Session(Protocol):
    """One open session. Every call raises `KVHostError` when it fails."""

    @property
    def boot_id(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def state(self) -> ServiceState: ...
    def lookup(
        self, queries: Iterable[Query], pin: bool = False, deadline_s: float | None = None
    ) -> list[Answer]: ...
    def reserve(self, count: int = 0, *, deadline_s: float | None = None) -> Reserved: ...
    def update(
        self,
        *,
        assigns: Iterable[StoreOf] = (),
        commits: Iterable[StoreOf] = (),
        aborts: Iterable[Abort] = (),
        releases: Iterable[int] = (),
        touches: Iterable[ChainQuery] = (),
        deadline_s: float | None = None,
        on_late: Callable[[Updated], None] | None = None,
    ) -> Updated: ...
    def declare(self, spec: Any, tokens: Mapping[int, bytes], deadline_s: float | None = None) -> Any: ...
    def reset(self, weights_version: str = "", deadline_s: float | None = None) -> Rebased: ...
    def ping(self, deadline_s: float | None = None) -> Any: ...
    def close(self) -> None: ...
