"""Commands of `kvhostctl` that change something in a running daemon."""

from __future__ import annotations

import time

import click

from kvhost_client.commands import (
    NO,
    YES,
    Options,
    Size,
    keys_or_request,
    namespace_option,
    progress,
    show,
    with_json,
)

_EVERY_S = 0.1


@click.command()
@click.argument("keys", nargs=-1, metavar="[HEXKEY...]")
@click.option("--all", "everything", is_flag=True, help="Every chunk of the namespace that nobody holds.")
@namespace_option
@with_json
def evict(options: Options, keys: tuple[str, ...], everything: bool, namespace: str) -> int:
    """Drops chunks that nobody holds.

    Those named, or --all. Exit code 1 if some are held.
    """
    if everything == bool(keys):
        raise click.UsageError("name the chunks to evict, or say --all; one of the two.")
    with options.admin() as admin:
        reply = admin.evict(keys, namespace, everything=everything)
    show(options, reply, f"{reply.evicted} evicted, {reply.held} held, {reply.absent} absent")
    return NO if reply.held else YES


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="REQUEST|HEXKEY...")
@namespace_option
@with_json
def pin(options: Options, what: tuple[str, ...], namespace: str) -> int:
    """Keeps a prefix: it is not evicted until unpin, a reset, or the daemon's end.

    WHAT is a request, by vLLM's name for it or a part of that, or chunks in hex; what they build on is kept
    with them. Exit code 1 if some are not there.
    """
    keys, request = keys_or_request(what)
    with options.admin() as admin:
        reply = admin.pin(keys, request, namespace)
    text = (
        f"{reply.pinned} pinned, {reply.already} pinned before, {reply.absent} absent; "
        f"{reply.total} of at most {reply.bound} in all"
    )
    show(options, reply, text)
    return NO if reply.absent else YES


@click.command()
@click.argument("what", nargs=-1, metavar="[REQUEST|HEXKEY...]")
@click.option("--all", "everything", is_flag=True, help="Everything that was pinned by hand.")
@namespace_option
@with_json
def unpin(options: Options, what: tuple[str, ...], everything: bool, namespace: str) -> int:
    """Lets go of what was pinned by hand.

    What other pinned chunks build on stays.
    """
    if everything == bool(what):
        raise click.UsageError("name what to unpin, or say --all; one of the two.")
    keys, request = keys_or_request(what)
    with options.admin() as admin:
        reply = admin.unpin(keys, request, namespace, everything=everything)
    show(options, reply, f"{reply.unpinned} unpinned, {reply.absent} were not pinned")
    return YES


@click.command("drop-namespace")
@click.argument("namespace")
@with_json
def drop_namespace(options: Options, namespace: str) -> int:
    """Gives the memory of a namespace that no engine uses back to the pool.

    Exit code 1 if some of it is held.
    """
    with options.admin() as admin:
        reply = admin.drop(namespace)
    show(options, reply, f"{reply.segments} segments given back, {reply.kept} kept because something is held")
    return NO if reply.kept else YES


@click.command()
@namespace_option
@with_json
def reset(options: Options, namespace: str) -> int:
    """Drops everything of a namespace.

    Held or not: nobody reads it again.
    """
    with options.admin() as admin:
        reply = admin.reset(namespace)
    show(options, reply, f"{reply.dropped} chunks dropped, generation {reply.generation}")
    return YES


@click.command("end-session")
@click.argument("number", type=click.IntRange(min=1))
@with_json
def end_session(options: Options, number: int) -> int:
    """Takes everything back from an engine.

    Its session ends. What its workers may still be writing is quarantined until they prove that they have
    stopped.
    """
    with options.admin() as admin:
        reply = admin.end_session(number)
    show(options, reply, f"session {number} ended, {reply.quarantined} slots quarantined")
    return YES


@click.command()
@click.option("--resume", is_flag=True, help="Grant again.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait so long until no engine writes any more.",
)
@with_json
def drain(options: Options, resume: bool, wait: float | None) -> int:
    """Grants nothing from now on.

    What is stored can be read, and nothing new is stored, until drain --resume or the daemon's end. With
    --wait, exit code 1 if engines still write when the time is over.
    """
    with options.admin() as admin:
        reply = admin.drain(resume=resume)
    left = _wait_for_writers(options, wait) if wait and not resume else 0
    show(options, reply, "state")
    return NO if left else YES


def _wait_for_writers(options: Options, wait: float) -> int:
    """Waits until nothing is granted; returns how many slots still are."""
    until = time.monotonic() + wait
    first = 0
    with progress("being written") as advance, options.admin() as admin:
        while True:
            left = sum(namespace.granted_slots for namespace in admin.namespaces())
            first = max(first, left)
            advance(first - left, first)
            if not left or time.monotonic() > until:
                return left
            time.sleep(_EVERY_S)


@click.command()
@click.option("--floor", type=Size(), help="Never below this much, once it has it.")
@click.option("--cap", type=Size(), help="Never above this much; 0 removes the cap.")
@click.option("--pool", type=Size(), help="Not a namespace but the whole pool: shrink or grow it to this.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="With --pool: wait so long for it.",
)
@namespace_option
@with_json
def limit(
    options: Options, *, floor: int | None, cap: int | None, pool: int | None, wait: float, namespace: str
) -> int:
    """Bounds a namespace, or gives the pool another size, while it is in use.

    Sizes are rounded up to whole segments. What is above a new bound, and not held, goes at once, the least
    recently used first. The pool keeps its size until the daemon ends: a lasting one stands in its
    configuration. Exit code 1 with --pool if it has not the new size when the wait is over; it goes on
    towards it where chunks are still held, not where memory is missing.

    \b
    Examples:
      kvhostctl limit --namespace 1 --floor 4GiB --cap 16GiB
      kvhostctl limit --pool 48GiB
    """
    if pool is not None:
        if floor is not None or cap is not None or namespace:
            raise click.UsageError("--pool goes without --floor, --cap and --namespace.")
        return _resize(options, pool, wait)
    if floor is None and cap is None:
        raise click.UsageError("say --floor, --cap, or both, as in --cap 8GiB; or --pool for the whole pool.")
    with options.admin() as admin:
        reply = admin.set_limits(namespace, floor_bytes=floor, cap_bytes=cap)
    bound = f"at most {reply.cap_segments}" if reply.cap_segments else "no cap"
    show(options, reply, f"at least {reply.floor_segments} segments, {bound}")
    return YES


def _resize(options: Options, size: int, wait: float) -> int:
    """Asks for another size, and waits until the pool has it."""
    until = time.monotonic() + wait
    with progress("resizing") as advance, options.admin() as admin:
        before = admin.status().memory.populated_bytes
        reply = admin.resize_pool(size)
        wanted = reply.segments * reply.segment_bytes
        while True:
            memory = admin.status().memory
            left = abs(wanted - memory.populated_bytes)
            advance(abs(wanted - before) - left, abs(wanted - before))
            # Planned for less than asked: the memory cannot be had.
            if not left or memory.segments < reply.segments or time.monotonic() > until:
                break
            time.sleep(_EVERY_S)
    show(options, memory, "memory")
    return NO if left else YES


# As it was called first.
limits = click.Command("limits", callback=limit.callback, params=limit.params, hidden=True, help=limit.help)

COMMANDS = (evict, reset, pin, unpin, limit, limits, drop_namespace, end_session, drain)
