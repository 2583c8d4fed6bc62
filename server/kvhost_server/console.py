"""The web page of the daemon and the document behind it: read-only, and complete without any other server."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kvhost_server import __version__
from kvhost_server.books import ServiceState
from kvhost_server.census import census_of
from kvhost_server.fates import EVICTIONS, Run
from kvhost_server.history import EVERY_S, History
from kvhost_server.metrics import Sources
from kvhost_server.web import Answer

MOST_NAMESPACES = 100
MOST_SESSIONS = 200
_LONGEST = 200
_SLOWEST = 0.99


def sample(sources: Sources) -> dict[str, float]:
    """The numbers that the last hour is drawn from; those that only rise are drawn as rates."""
    books, lookups = sources.books, sources.measures.lookups
    return {
        "hit_tokens": lookups["hit_tokens"],
        "miss_tokens": lookups["miss_tokens"],
        "load_bytes": books.bytes_of("pinned_chunks"),
        "commit_bytes": books.bytes_of("committed_chunks"),
        "evictions": sum(books.fates.evicted.values()),
        "used_bytes": sum(one.used for one in census_of(books)),
    }


class Console:
    """What is shown.

    Args:
        config: every option with its value.
        config_sources: where each value came from.
    """

    def __init__(
        self,
        sources: Sources,
        history: History,
        config: Callable[[], Mapping[str, str]],
        config_sources: Callable[[], Mapping[str, str]],
    ) -> None:
        self._sources = sources
        self._history = history
        self._config = config
        self._config_sources = config_sources

    async def status(self) -> Answer:
        """Everything that the page shows, as JSON."""
        return Answer(json.dumps(self.document(), allow_nan=False).encode(), "application/json")

    def document(self) -> dict[str, Any]:
        sources = self._sources
        books, pool, fates = sources.books, sources.pool, sources.books.fates
        now = books.clock()
        census = sorted(census_of(books), key=lambda one: -one.used)
        happened = {**books.anomalies, **sources.anomalies()}
        return {
            "version": __version__,
            "state": books.state.name.lower(),
            "started": sources.started,
            "populated": pool.populated,
            "memory": {
                "asked": pool.asked_bytes,
                "capacity": pool.capacity_bytes,
                "populated": pool.populated_bytes,
                "locked": pool.locked_bytes,
                "lock": sources.lock.value,
                "hugepages": pool.hugepages,
                "used": sum(one.used for one in census),
                "pinned": sum(one.pinned for one in census),
                "reserved": sum(one.reserved for one in census),
                "quarantined": sum(one.quarantined for one in census),
                "lent": sum(one.capacity for one in census),
                "notes": list(pool.notes),
            },
            "namespaces": [
                {
                    "number": one.namespace.number,
                    "digest": one.namespace.digest.hex()[:12],
                    "model": one.namespace.spec.model[:_LONGEST],
                    "name": one.namespace.spec.name[:_LONGEST],
                    "capacity": one.capacity,
                    "used": one.used,
                    "pinned": one.pinned,
                    "reserved": one.reserved,
                    "quarantined": one.quarantined,
                    "chunks": len(one.namespace.table.index),
                    "slots": one.namespace.table.slots,
                    "sessions": len(one.namespace.sessions),
                    "hit_tokens": one.namespace.counters["hit_tokens"],
                    "miss_tokens": one.namespace.counters["miss_tokens"],
                }
                for one in census[:MOST_NAMESPACES]
            ],
            "sessions": [
                {
                    "number": session.number,
                    "label": session.label,
                    "namespace": session.namespace.number if session.namespace else 0,
                    "pid": session.identity.pid,
                    "age_s": now - session.opened_at,
                    "ready": session.ready,
                    "workers": len(session.mapping_of_rank),
                    "pins": session.pin_count,
                    "grants": len(session.grants),
                }
                for session in list(books.sessions.values())[-MOST_SESSIONS:]
            ],
            "totals": {
                "namespaces": len(books.namespaces),
                "sessions": len(books.sessions),
                "mappings": len(books.custody.mappings),
                "lookups": sources.measures.lookups["queries"],
                "hit_tokens": sources.measures.lookups["hit_tokens"],
                "miss_tokens": sources.measures.lookups["miss_tokens"],
                "commits": books.counters["committed_chunks"],
                "evictions": {cause.name.lower(): fates.evicted[cause] for cause in EVICTIONS},
                "no_space": books.counters["no_space"],
                "bound": books.counters["bound_reached"],
                "loop_lag_max_s": sources.lag.largest_s,
            },
            "slow_s": {
                method: measure.seconds.quantile(_SLOWEST)
                for (service, method), measure in sources.measures.calls.items()
                if service == "Cache" and measure.seconds.count
            },
            "evictions": [_run(run, now) for run in reversed(fates.runs)],
            "anomalies": {name: count for name, count in sorted(happened.items()) if count},
            "config": [
                {"name": name, "value": value, "source": self._config_sources().get(name, "default")}
                for name, value in self._config().items()
            ],
            "history": {"every_s": EVERY_S, "last_s": self._history.last_s, **self._history.columns()},
        }

    async def alive(self) -> Answer:
        """The loop turns."""
        return Answer(b"alive\n")

    async def ready(self) -> Answer:
        """Engines are served."""
        state = self._sources.books.state
        if state is ServiceState.SERVING:
            return Answer(b"serving\n")
        done = f", {self._sources.pool.populated:.0%} populated" if state is ServiceState.STARTING else ""
        return Answer(f"{state.name.lower()}{done}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


async def page() -> Answer:
    """The page. It fills itself with `/api/status.json`, every few seconds."""
    body, policy = _page()
    return Answer(body, "text/html; charset=utf-8", headers={"Content-Security-Policy": policy})


@cache
def _page() -> tuple[bytes, str]:
    """The page, and a policy under which it runs its own script and style and nothing else."""
    text = Path(__file__).with_name("console.html").read_text(encoding="utf-8")

    def digests(tag: str) -> str:
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
            for inside in re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        )

    policy = (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return text.encode(), policy


def _run(run: Run, now: float) -> dict[str, Any]:
    return {
        "namespace": run.namespace,
        "cause": run.cause.name.lower(),
        "taker": run.taker,
        "chunks": run.chunks,
        "began_s": now - run.began,
        "ended_s": now - run.ended,
        "youngest_s": run.youngest_s,
        "oldest_s": run.oldest_s,
    }
