"""How `kvhostctl` shows replies: as tables for people, as plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table

from kvhost_proto.v1 import admin_pb2, common_pb2

_WIDTH_IN_PIPES = 160
_COUNTERS_ABREAST = 3
_NAMESPACES_COMPARED = 6
_LONGEST_PART = 60


def plain(value: Any) -> Any:
    """A message, or a container of messages, as what JSON knows: all fields, enums as their short names."""
    if isinstance(value, Message):
        return {field.name: _field(value, field) for field in value.DESCRIPTOR.fields}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in sorted(value.items())}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.enum_type is None:
        return plain(value)
    if isinstance(value, int):
        return _short_name(field.enum_type, value)
    return [_short_name(field.enum_type, number) for number in value]


def _short_name(enum: Any, number: int) -> str | int:
    """SERVICE_STATE_SERVING of enum ServiceState is SERVING."""
    known = enum.values_by_number.get(number)
    if known is None:
        return number
    prefix = "".join(f"_{letter}" if letter.isupper() else letter for letter in enum.name).strip("_")
    return str(known.name).removeprefix(prefix.upper() + "_")


def size(nbytes: int) -> str:
    """Bytes for people, as 1.5 GiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def age(seconds: float) -> str:
    """A span of time for people, in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    for above, unit, below, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= above:
            return f"{whole // above} {unit} {whole % above // below} {rest}"
    return f"{whole} s"


def state_name(value: int) -> str:
    """Name of a service state, for people."""
    return str(_short_name(common_pb2.ServiceState.DESCRIPTOR, value))


def printable(text: str) -> str:
    """A peer's text for a terminal: nothing that would move the cursor or change colours."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _console() -> Console:
    # No markup: square brackets in names are only that.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDTH_IN_PIPES)


def _table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    right = set(numbers)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def status(reply: admin_pb2.StatusReply) -> None:
    """Everything about a daemon on one page."""
    console = _console()
    console.print(
        f"{reply.version.program or 'kvhostd'}  {state_name(reply.state)}  pid {reply.pid}  "
        f"up {age(reply.uptime_s)}  boot {reply.boot_id}",
        style="bold",
    )
    _memory(console, reply.memory)
    _namespaces(console, reply.namespaces)
    _sessions(console, reply.sessions)
    _counters(console, "counter", reply.counters)
    happened = {name: count for name, count in reply.anomalies.items() if count}
    if happened:
        _counters(console, "anomaly", happened)
    else:
        console.print("no anomalies")


def memory(reply: admin_pb2.Memory) -> None:
    """The pool alone."""
    _memory(_console(), reply)


def _memory(console: Console, memory: admin_pb2.Memory) -> None:
    console.print(
        f"memory   {size(memory.capacity_bytes)} of {size(memory.asked_bytes)} asked, "
        f"{size(memory.populated_bytes)} populated, {size(memory.locked_bytes)} locked, "
        f"hugepages {memory.hugepages or 'off'}"
    )
    console.print(
        f"segments {memory.segments} of {size(memory.segment_bytes)}, {memory.free_segments} free, "
        f"{memory.retiring_segments} retiring"
    )
    console.print(
        f"in use   {size(memory.used_bytes)} stored, {size(memory.pinned_bytes)} pinned, "
        f"{size(memory.granted_bytes)} granted, {size(memory.quarantined_bytes)} quarantined"
    )
    for note in memory.notes:
        console.print(f"note     {printable(note)}", style="yellow")


def namespaces(reply: Mapping[str, Sequence[admin_pb2.NamespaceStatus]], every_part: bool = False) -> None:
    """One line a namespace, and below what differs between them: why they do not share."""
    console, told = _console(), reply["namespaces"]
    _namespaces(console, told)
    shown = told[:_NAMESPACES_COMPARED]
    parts = {one.number: _parts(one) for one in shown}
    names = sorted({name for each in parts.values() for name in each})
    apart = [name for name in names if len({each.get(name) for each in parts.values()}) > 1]
    rows = names if every_part else apart
    if len(shown) > 1 and not apart:
        console.print("these differ in nothing that engines say: one was reset, or is of older weights")
    if not rows or (len(shown) < 2 and not every_part):
        return
    console.print(
        "every part:" if every_part else "why they do not share: these parts of their digests differ"
    )
    table = _table("part", *(f"namespace {number}" for number in parts))
    for name in rows:
        table.add_row(
            printable(name), *(printable(_short(each.get(name, "not said"))) for each in parts.values())
        )
    console.print(table)
    if len(told) > len(shown):
        console.print(f"{len(told) - len(shown)} more are compared with --json")


def every_part(reply: Mapping[str, Sequence[admin_pb2.NamespaceStatus]]) -> None:
    """The same with all parts."""
    namespaces(reply, True)


def config(reply: Mapping[str, Any]) -> None:
    """One line an option."""
    console = _console()
    table = _table("option", "value", "from")
    for name, option in reply["config"].items():
        table.add_row(name.replace("_", "-"), option["value"], option["source"])
    console.print(table)
    if reply["metrics_url"]:
        console.print(f"metrics and a page for people: {reply['metrics_url']}/")


def explained(reply: admin_pb2.ExplainReply) -> None:
    """Where each chain breaks, and what became of its chunks; equal neighbours are one line."""
    console = _console()
    if reply.request:
        console.print(
            f"request {printable(reply.request)}: looked up {age(reply.age_s)} ago by session "
            f"{reply.session_number}, in namespace {reply.namespace_number}",
            style="bold",
        )
    for chain in reply.chains:
        then = f"; {chain.hits_then} were there when it was looked up" if reply.request else ""
        console.print(f"group {chain.group}: {chain.summary}{then}")
        table = _table("chunks", "key", "state", "when", "why")
        start = 0
        for at, chunk in enumerate(chain.chunks):
            following = chain.chunks[at + 1] if at + 1 < len(chain.chunks) else None
            if following is not None and (following.state, following.why) == (chunk.state, chunk.why):
                continue
            first = chain.chunks[start]
            when = f"{age(chunk.ago_s)} ago" if chunk.ago_s else ""
            span = f"{start + 1} to {at + 1}" if at > start else f"{at + 1}"
            table.add_row(span, f"{first.key[:16]}…", chunk.state, when, printable(chunk.why))
            start = at + 1
        console.print(table)


def _parts(one: admin_pb2.NamespaceStatus) -> dict[str, str]:
    """Everything that the digest covers, by name."""
    layout = one.layout
    groups = ", ".join(
        f"{group.id} {_short_name(common_pb2.Semantics.DESCRIPTOR, group.semantics)} {group.tokens_per_chunk}"
        for group in layout.groups
    )
    return {
        **{part.name: part.value for part in one.parts},
        "namespace name": one.name,
        "layout": f"{layout.shards} shards of {layout.shard_bytes} B, {layout.ranks} ranks, groups {groups}",
    }


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_PART else f"{text[: _LONGEST_PART - 1]}…"


def sessions(reply: Mapping[str, Sequence[admin_pb2.SessionStatus]]) -> None:
    """One line a session."""
    _sessions(_console(), reply["sessions"])


def chunks(reply: Mapping[str, Sequence[admin_pb2.ChunkStatus]]) -> None:
    """One line a chunk."""
    table = _table("key", "state", "slot", "pins", "children", "idle", numbers=("pins", "children", "idle"))
    for chunk in reply["chunks"]:
        ready = chunk.state == "ready"
        table.add_row(
            chunk.key,
            chunk.state,
            f"{chunk.slot >> 32}:{chunk.slot & 0xFFFFFFFF}" if ready else "",
            str(chunk.pins) if ready else "",
            str(chunk.children) if ready else "",
            age(chunk.idle_s) if ready else "",
        )
    _console().print(table)


def drained(reply: admin_pb2.DrainReply) -> None:
    """The new state."""
    _console().print(state_name(reply.state))


def _namespaces(console: Console, all_of_them: Sequence[admin_pb2.NamespaceStatus]) -> None:
    if not all_of_them:
        console.print("no namespaces: no engine has declared one yet")
        return
    numbers = ("chunks", "slots", "slot", "segments", "pinned", "granted", "quarantined", "sessions")
    table = _table("namespace", "digest", "model", *numbers, numbers=numbers)
    for one in all_of_them:
        table.add_row(
            str(one.number),
            one.digest[:12],
            printable(f"{one.model} [{one.name}]" if one.name else one.model),
            str(one.chunks),
            str(one.slots),
            size(one.slot_bytes),
            str(one.segments),
            str(one.pinned_chunks),
            str(one.granted_slots),
            str(one.quarantined_slots),
            str(one.sessions),
        )
    console.print(table)
    for one in all_of_them:
        console.print(f"policy of namespace {one.number}: {printable(one.policy)}", style="dim")


def _sessions(console: Console, all_of_them: Sequence[admin_pb2.SessionStatus]) -> None:
    if not all_of_them:
        console.print("no sessions: no engine is connected")
        return
    numbers = ("pins", "grants", "quarantined")
    table = _table(
        "session", "state", "engine", "namespace", "pid", "uid", "age", *numbers, "workers", numbers=numbers
    )
    for one in all_of_them:
        workers = [f"{m.rank}: pid {m.pid}, {m.segments} segments" for m in one.mappings]
        table.add_row(
            str(one.number),
            one.state,
            printable(one.label),
            str(one.namespace_number or ""),
            str(one.pid),
            str(one.uid),
            age(one.age_s),
            f"{one.pins} of {one.pin_bound}" if one.pin_bound else str(one.pins),
            f"{one.grants} of {one.grant_bound}" if one.grant_bound else str(one.grants),
            str(one.quarantined),
            "\n".join(workers),
        )
    console.print(table)


def _counters(console: Console, title: str, counts: Mapping[str, int]) -> None:
    """Names and counts, several beside each other, in alphabetical order downwards."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for _ in range(_COUNTERS_ABREAST):
        table.add_column(title)
        table.add_column("count", justify="right")
    names = sorted(counts)
    height = -(-len(names) // _COUNTERS_ABREAST)
    for row in range(height):
        table.add_row(*(text for name in names[row::height] for text in (name, str(counts[name]))))
    console.print(table)


TABLES: dict[str, Callable[[Any], None]] = {
    "status": status,
    "memory": memory,
    "namespaces": namespaces,
    "sessions": sessions,
    "chunks": chunks,
    "namespaces and parts": every_part,
    "config": config,
    "explained": explained,
    "state": drained,
}
"""By the name under which `ctl` asks for them."""
