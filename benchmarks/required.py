"""The figures that kvhost is held to: key, bound, what it means, and which benchmark measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Bound:
    """A figure must be at most (`<=`) or at least (`>=`) `limit`."""

    key: str
    sign: Literal["<=", ">="]
    limit: float
    what: str
    benchmark: str

    def met(self, value: float) -> bool:
        return value <= self.limit if self.sign == "<=" else value >= self.limit

    @property
    def text(self) -> str:
        """`<= 1.3`, as the table and docs/claims.md show it."""
        return f"{self.sign} {self.limit:g}"


BOUNDS: tuple[Bound, ...] = (
    Bound("scheduler_rpc_waits", "<=", 0, "calls that the engine's thread waited for, steady state", "hooks"),
    Bound(
        "hook_cost_p50_ratio",
        "<=",
        1.3,
        "time in the scheduler's hooks per step, median, beside vLLM's own in-process LRU manager",
        "hooks",
    ),
    Bound("hook_cost_p99_ms", "<=", 1, "the same, 99th percentile, in milliseconds", "hooks"),
    Bound("lookup_8192_ms", "<=", 3.3, "lookup of 8192 hashes through the client", "lookup"),
    Bound("lookup_1_vs_noop", "<=", 1.2, "lookup of one hash / a gRPC call that does nothing", "lookup"),
    Bound("copy_store_vs_page_floor", ">=", 1.3, "store, one core / libc memcpy page by page", "copying"),
    Bound("copy_load_vs_page_floor", ">=", 1.3, "load, one core / libc memcpy page by page", "copying"),
    Bound("copy_store_vs_nt_floor", ">=", 0.9, "store / one large memcpy of the same bytes", "copying"),
    Bound("copy_load_vs_nt_floor", ">=", 0.9, "load / one large memcpy of the same bytes", "copying"),
    Bound("first_store_vs_warm", ">=", 0.9, "first store into fresh memory / later ones", "copying"),
    Bound("cpu_s_per_gib_store", "<=", 0.15, "processor seconds for storing a GiB", "copying"),
    Bound("cpu_s_per_gib_load", "<=", 0.15, "processor seconds for loading a GiB", "copying"),
    Bound(
        "ttft_restart_vs_cold",
        "<=",
        0.13,
        "time to first token after an engine's restart / without a cache, the demo's model",
        "end_to_end",
    ),
    Bound(
        "unique_throughput_vs_plain",
        ">=",
        0.95,
        "throughput on prompts that nobody asked before, with / without kvhost",
        "end_to_end",
    ),
    Bound("idle_rss_mib", "<=", 60, "resident memory of an idle daemon without its region, MiB", "daemon"),
    Bound("port_open_s", "<=", 0.5, "from the daemon's start until it answers, seconds", "daemon"),
    Bound("idle_cpu_pct", "<=", 0.3, "processor use of an idle daemon, percent of a core", "daemon"),
    Bound("index_bytes_per_chunk", "<=", 400, "the daemon's memory for a chunk's entry, bytes", "daemon"),
    Bound("lookup_4m_vs_1k", "<=", 1.5, "median lookup with 4M chunks stored / with 1k", "daemon"),
    Bound(
        "requests_per_s", ">=", 8000, "64-hash lookups per second of the daemon's processor time", "daemon"
    ),
    Bound("hit_rate_1k_vs_lru", ">=", 1.5, "hits of the default policy / LRU, 1k blocks", "hit_rate"),
    Bound("hit_rate_3k_vs_lru", ">=", 1.5, "hits of the default policy / LRU, 3k blocks", "hit_rate"),
    Bound(
        "hit_rate_worst_vs_lru_points",
        ">=",
        -0.5,
        "worst difference of the default policy to LRU over both traces and all sizes, points",
        "hit_rate",
    ),
    Bound("load_vs_lmcache", ">=", 3, "load, GB/s, beside LMCache's server in one run", "peers"),
    Bound("store_vs_lmcache", ">=", 8, "store, GB/s, beside LMCache's server in one run", "peers"),
    Bound("cpu_vs_lmcache", "<=", 0.2, "processor seconds a GiB, beside LMCache's server", "peers"),
)

BY_KEY = {bound.key: bound for bound in BOUNDS}
