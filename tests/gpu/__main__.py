"""`make test-gpu`: the tests that need a GPU, with only torch, numpy, pytest, grpcio and protobuf installed.

Exits with 2 and one line where there is no GPU: a run that tested nothing must not look like one that passed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.gpu.device import missing

FOLDER = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    why = missing()
    if why:
        print(f"test-gpu: nothing was run, {why}", file=sys.stderr)
        return 2
    import pytest

    return int(pytest.main(["-c", str(FOLDER / "gpu.ini"), "-s", str(FOLDER), *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
