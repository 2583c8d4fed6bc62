"""How the pool is cut: size and number of segments, and the kind of pages, decided before anything is made.

Refuses here, in one sentence, what this host can never give (I9, E4).
"""

import dataclasses
import enum
from dataclasses import dataclass

from kvhost_server.exits import ExitCode, StartupError
from kvhost_server.populate import LARGEST_PIECE
from kvhost_server.room import Surveyor
from kvhost_server.units import format_size

PAGE = 4096
HUGE_2M = 2 << 20
HUGE_1G = 1 << 30
MOST_SEGMENTS = 4096


class HugePages(enum.StrEnum):
    """What `--hugepages` may ask."""

    OFF = "off"
    AUTO = "auto"
    TWO_MIB = "2MiB"
    ONE_GIB = "1GiB"


_PAGE_OF = {HugePages.TWO_MIB: HUGE_2M, HugePages.ONE_GIB: HUGE_1G}


@dataclass(frozen=True)
class Plan:
    """The pool as it will be, sizes in bytes."""

    asked_bytes: int
    segment_bytes: int
    segments: int
    huge_page: int
    """0 for ordinary pages."""
    notes: tuple[str, ...] = ()
    """What is not as asked, one line each."""

    @property
    def total_bytes(self) -> int:
        return self.segment_bytes * self.segments

    @property
    def hugepages(self) -> HugePages:
        """The kind of pages got."""
        return next((name for name, page in _PAGE_OF.items() if page == self.huge_page), HugePages.OFF)

    @property
    def piece(self) -> int:
        """Bytes to populate, lock or zero in one step."""
        return max(LARGEST_PIECE, self.huge_page)


def plan_pool(memory: int, segment_size: int | None, hugepages: HugePages, surveyor: Surveyor) -> Plan:
    """Cuts `memory` bytes into equal segments; what does not fill a whole segment is left out.

    Raises:
        StartupError: the sizes do not go together, or the host can never give that much.
    """
    if hugepages is HugePages.AUTO:
        plan = _automatic(memory, segment_size, surveyor)
    else:
        plan = _cut(memory, segment_size, _PAGE_OF.get(hugepages, 0))
    if plan.huge_page:
        _check_huge(plan, surveyor)
    else:
        _check_ordinary(plan, surveyor)
    return plan


def default_segment_bytes(memory: int) -> int:
    """About 128 segments, but none below 64 MiB; fewer and smaller ones in small pools."""
    if memory >= 1 << 30:
        return max(64 << 20, -(-memory // 128 // HUGE_2M) * HUGE_2M)
    parts = 16 if memory >= 64 << 20 else 4
    return max(PAGE, memory // parts // PAGE * PAGE)


def _cut(memory: int, segment_size: int | None, huge_page: int) -> Plan:
    page = huge_page or PAGE
    size = segment_size or -(-default_segment_bytes(memory) // page) * page
    if size % page:
        raise _usage(
            f"--segment-size {format_size(size)} is not a whole number of pages; pages are "
            f"{format_size(page)} here"
        )
    if memory < size:
        what = f"a segment of {format_size(size)}" if segment_size else f"one page of {format_size(page)}"
        raise _usage(f"--memory {format_size(memory)} is too little for {what}; give more")
    segments = memory // size
    if segments > MOST_SEGMENTS:
        raise _usage(
            f"--memory {format_size(memory)} in segments of {format_size(size)} makes {segments} of them, "
            "and at most "
            f"{MOST_SEGMENTS} are allowed; give a --segment-size of at least "
            f"{format_size(-(-memory // MOST_SEGMENTS // page) * page)}"
        )
    return Plan(memory, size, segments, huge_page)


def _automatic(memory: int, segment_size: int | None, surveyor: Surveyor) -> Plan:
    """Huge pages of 2 MiB where enough of them are free, else ordinary pages and a note."""
    ordinary = _cut(memory, segment_size, 0)
    fits = memory >= HUGE_2M and (segment_size or HUGE_2M) % HUGE_2M == 0
    if fits:
        huge = _cut(memory, segment_size, HUGE_2M)
        limit = surveyor.huge_pages(HUGE_2M)
        if limit.room >= huge.total_bytes:
            return huge
        why = f"{limit.room // HUGE_2M} of {huge.total_bytes // HUGE_2M} huge pages are free ({limit.source})"
    else:
        why = "the segments are no whole number of 2MiB pages"
    return dataclasses.replace(ordinary, notes=(f"--hugepages auto: ordinary pages, because {why}",))


def _check_huge(plan: Plan, surveyor: Surveyor) -> None:
    page = format_size(plan.huge_page)
    needed = plan.total_bytes // plan.huge_page
    limit = surveyor.huge_pages(plan.huge_page)
    if limit.total < plan.total_bytes:
        how = (
            f"'sysctl vm.nr_hugepages={needed}'"
            if plan.huge_page == HUGE_2M
            else f"'hugepagesz=1G hugepages={needed}' on the kernel's command line"
        )
        raise StartupError(
            f"--hugepages {page} with --memory {format_size(plan.asked_bytes)} needs {needed} huge pages "
            f"of {page}, but the host has {limit.total // plan.huge_page}, {limit.room // plan.huge_page} "
            f"of them free ({limit.source}); reserve them with {how}, or use --hugepages auto",
            ExitCode.MEMORY,
        )


def _check_ordinary(plan: Plan, surveyor: Surveyor) -> None:
    limit = surveyor.measure().hardest
    if plan.total_bytes > limit.total:
        raise StartupError(
            f"--memory asks for {format_size(plan.asked_bytes)}, but {limit.source} allows "
            f"{format_size(limit.total)} in all ({format_size(limit.room)} of it unused); ask for less, "
            "or raise that limit",
            ExitCode.MEMORY,
        )


def _usage(message: str) -> StartupError:
    return StartupError(message, ExitCode.USAGE)
