"""Commands of `kvhostctl` that look and change nothing."""

from __future__ import annotations

import time

import click

from kvhost_client.commands import (
    NO,
    YES,
    Options,
    keys_or_request,
    namespace_option,
    progress,
    show,
    with_json,
)
from kvhost_client.errors import Unavailable

SERVING = "SERVING"
_EVERY_S = 0.1


@click.command()
@with_json
def status(options: Options) -> int:
    """Everything about the daemon on one page.

    Its memory, namespaces and sessions, all counters, and what should not have happened.
    """
    with options.admin() as admin:
        reply = admin.status()
    show(options, reply, "status")
    return YES


@click.command()
@with_json
@click.option("--parts", is_flag=True, help="Every part of each digest, not only those that differ.")
def namespaces(options: Options, parts: bool) -> int:
    """Which models are cached, how much of each, and why two namespaces do not share.

    Engines share when every part of their namespaces' digests is equal. What differs is shown below the
    table; --json has every part.
    """
    with options.admin() as admin:
        reply = admin.namespaces()
    show(options, {"namespaces": reply}, "namespaces and parts" if parts else "namespaces")
    return YES


@click.command()
@with_json
def sessions(options: Options) -> int:
    """Which engines are connected, and what they hold."""
    with options.admin() as admin:
        reply = admin.sessions()
    show(options, {"sessions": reply}, "sessions")
    return YES


@click.command()
@click.argument("keys", nargs=-1, required=True, metavar="HEXKEY...")
@namespace_option
@with_json
def lookup(options: Options, keys: tuple[str, ...], namespace: str) -> int:
    """Which of these chunks are there. Exit code 1 unless all are ready.

    A key is the block hash followed by the group index (8 hex digits).
    """
    with options.admin() as admin:
        chunks = admin.lookup(keys, namespace)
    show(options, {"chunks": chunks}, "chunks")
    return YES if all(chunk.state == "ready" for chunk in chunks) else NO


@click.command()
@click.argument("service", default="")
@click.option("--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait so long for a yes.")
@with_json
def health(options: Options, service: str, wait: float | None) -> int:
    """Does it serve?

    SERVICE may be "liveness", or "kvhost.v1.Cache". Exit code 1 if it does not. With --wait, a daemon that
    populates its pool is watched doing so.
    """
    state = _watch_health(options, service, wait) if wait else _health(options, service)
    show(options, {"service": service, "status": state}, state)
    return YES if state == SERVING else NO


def _health(options: Options, service: str) -> str:
    with options.admin() as admin:
        return admin.health(service)


def _watch_health(options: Options, service: str, wait: float) -> str:
    """The health at last; meanwhile how far populating is."""
    until = time.monotonic() + wait
    with progress("populating") as advance:
        while True:
            try:
                state = _health(options, service)
                if state != SERVING:
                    with options.admin() as admin:
                        memory = admin.status().memory
                    advance(memory.populated_bytes, memory.capacity_bytes)
            except Unavailable:  # not there yet
                if time.monotonic() > until:
                    raise
                state = ""
            if state == SERVING or time.monotonic() > until:
                return state
            time.sleep(_EVERY_S)


@click.command()
@with_json
def check(options: Options) -> int:
    """Verifies the daemon's own books. Exit code 1 if they do not add up."""
    with options.admin() as admin:
        reply = admin.check()
    show(options, reply, "\n".join(reply.problems) or "consistent")
    return YES if reply.ok else NO


@click.command()
@with_json
def config(options: Options) -> int:
    """What the daemon was told, and where each value came from."""
    with options.admin() as admin:
        reply = admin.status()
    values = {
        name: {"value": value, "source": reply.config_sources.get(name, "default")}
        for name, value in sorted(reply.config.items())
    }
    show(options, {"config": values, "metrics_url": reply.metrics_url}, "config")
    return YES


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="REQUEST|HEXKEY...")
@namespace_option
@with_json
def explain(options: Options, what: tuple[str, ...], namespace: str) -> int:
    """Why did it miss?

    Says where the chain of a prompt breaks, and what became of each chunk: never stored, evicted when and for
    whom, refused why, or in another namespace and what differs. WHAT is a request, by vLLM's name for it or a
    part of that (of the last few hundred), or the keys of one chain in hex, head first. Exit code 1 unless
    every chunk can be loaded.
    """
    keys, request = keys_or_request(what)
    with options.admin() as admin:
        reply = admin.explain(keys, request, namespace)
    show(options, reply, "explained")
    return YES if all(chain.usable == len(chain.chunks) for chain in reply.chains) else NO


COMMANDS = (status, namespaces, sessions, lookup, explain, health, config, check)
