"""What every drill with real engines compares with: the same engine without a connector."""

from collections.abc import Iterator

import pytest

from tests.drills.engines import Oracle
from tests.e2e.models import Recipe, checkpoint


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """The tiny Llama in float32, alone; started when it is first asked."""
    with Oracle(checkpoint(Recipe())) as one:
        yield one
