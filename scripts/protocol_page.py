"""The protocol reference: a Markdown page made from the .proto files and their comments.

It reads the dialect that these files are written in: one declaration a line, comments above or behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "proto" / "kvhost_proto" / "v1"
FILES = ("cache", "admin", "handover", "common")
HEAD = """\
# Protocol

This page is made from the `.proto` files in `proto/kvhost_proto/v1` (`make docs`). Three sockets stand side
by side: `kvhostd.sock` speaks `kvhost.v1.Cache` and `kvhostd-admin.sock` speaks `kvhost.v1.Admin`, both gRPC
with health, reflection and channelz beside them; `kvhostd-handover.sock` passes file descriptors. Fields are
added, and numbers are never used twice.
"""
_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{(\})?$")
_RPC = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);$")
_FIELD = re.compile(r"(?:(repeated|optional) )?(map<\w+, \w+>|[\w.]+) (\w+) = (\d+)(?: \[[^\]]*\])?;$")
_VALUE = re.compile(r"(\w+) = (\d+);$")
_IGNORED = re.compile(r"(syntax|package|import|option|reserved) ?.*;$")


class UnknownLine(ValueError):
    """A line that this cannot read: say so rather than leave it out."""


@dataclass
class Row:
    """A field, a value or a call."""

    cells: tuple[str, ...]
    about: str


@dataclass
class Block:
    """A service, a message or an enum."""

    kind: str
    name: str
    about: str
    rows: list[Row] = field(default_factory=list)


@dataclass
class ProtoFile:
    """One file: what stands at its head, and its declarations in order."""

    name: str
    about: str
    blocks: list[Block]


def parse(text: str, name: str) -> ProtoFile:
    """Reads one file.

    Raises:
        UnknownLine: it has a line of another dialect.
    """
    file = ProtoFile(name, "", [])
    comment: list[str] = []
    choice = ""
    for number, raw in enumerate(text.splitlines(), 1):
        code, _, behind = (part.strip() for part in raw.partition("//"))
        if not code:
            if raw.strip():
                comment.append(behind)
            else:
                comment = []
            continue
        about = " ".join([*comment, *([behind] if behind else [])])
        comment = []
        if code.startswith("syntax"):
            file.about = about
        elif found := _BLOCK.match(code):
            kind, block = found.group(1, 2)
            if kind == "oneof":
                choice = block
            else:
                file.blocks.append(Block(kind, block, about))
        elif code == "}":
            choice = ""
        elif row := _row(code, about, choice):
            file.blocks[-1].rows.append(row)
        elif not _IGNORED.match(code):
            raise UnknownLine(f"{name}.proto, line {number}: {code}")
    return file


def _row(code: str, about: str, choice: str) -> Row | None:
    if found := _RPC.match(code):
        name, sends, request, streams, reply = found.groups()
        takes, gives = f"`{request}`", f"`{reply}`"
        return Row(
            (
                f"`{name}`",
                f"stream of {takes}" if sends else takes,
                f"stream of {gives}" if streams else gives,
            ),
            about,
        )
    if found := _FIELD.match(code):
        label, kind, name, number = found.groups()
        words = [word for word in (label, f"`{kind}`") if word]
        if choice:
            about = " ".join([about, "One of those that say so."]).strip()
        return Row((number, f"`{name}`", " ".join(words)), about)
    if found := _VALUE.match(code):
        return Row((found[2], f"`{found[1]}`"), about)
    return None


def read() -> list[ProtoFile]:
    """All files, in the order of the page."""
    return [parse((FOLDER / f"{name}.proto").read_text(), name) for name in FILES]


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for file in read() for line in _section(file))])


def _section(file: ProtoFile) -> Iterator[str]:
    yield from (f"## {file.name}.proto", "", _prose(file.about), "")
    headings = {
        "service": ("call", "takes", "gives"),
        "message": ("number", "field", "type"),
        "enum": ("number", "value"),
    }
    for block in file.blocks:
        yield from (f"### {block.name}", "", f"*{block.kind}* {_prose(block.about)}".strip(), "")
        if block.rows:
            cells = (*headings[block.kind], "meaning")
            yield f"| {' | '.join(cells)} |"
            yield f"|{'---|' * len(cells)}"
            for row in block.rows:
                yield f"| {' | '.join((*row.cells, _prose(row.about)))} |"
            yield ""


def _prose(text: str) -> str:
    """A comment as Markdown: nothing in it is a tag, a link or a column."""
    return re.sub(r"([|<>\[\]*_])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")
