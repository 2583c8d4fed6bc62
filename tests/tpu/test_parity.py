"""docs/parity.md names tests: each is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[a-z_/0-9]+\.py)::(test_[a-z_0-9]+)`")


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "parity.md").read_text()
    named = NAMED.findall(page)
    assert len(named) > 50
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert not missing
