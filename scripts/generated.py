"""Files of the checkout that are made from the code: `make docs` writes them, `--check` holds them to it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def keep(
    file: Path, wanted: str, *, stale: str, program: str, what: str | None, arguments: list[str] | None
) -> int:
    """Writes what the file must say or, with `--check`, prints `stale` and returns 1 when it says otherwise.

    `program` and `what` are for `--help`; `arguments` are those of the command line when None.
    """
    parser = argparse.ArgumentParser(prog=program, description=what)
    parser.add_argument(
        "--check", action="store_true", help=f"write nothing, exit 1 when {file.name} would change"
    )
    if parser.parse_args(arguments).check:
        if not file.exists() or file.read_text() != wanted:
            print(stale, file=sys.stderr)
            return 1
        return 0
    file.write_text(wanted)
    return 0
