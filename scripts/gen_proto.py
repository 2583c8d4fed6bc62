"""Generates `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` from the `.proto` files; `--check` only compares.

The generator is old on purpose. Generated code loads under a protobuf runtime of its own major
version and of the next; engines bring 6 or 7, so 6.30 is what grpcio-tools 1.72 writes. It lives in
an environment of its own in the user's cache, made at first use.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.user_cache import small_environment

GENERATOR = "grpcio-tools==1.72.1"
PROTO = Path(__file__).resolve().parent.parent / "proto"
PACKAGE = Path("kvhost_proto/v1")
# Only these two hold services.
WITH_SERVICES = ("cache.proto", "admin.proto")
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gen_proto", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a file would change")
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        wanted = modules(Path(folder) / PACKAGE)
    found = modules(PROTO / PACKAGE)
    changed = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if options.check:
        for name in changed:
            print(f"{PACKAGE / name} is not what the .proto files give: run `make proto`", file=sys.stderr)
        return 1 if changed else 0
    for name in changed:
        target = PROTO / PACKAGE / name
        if name in wanted:
            target.write_bytes(wanted[name])
        else:
            target.unlink()
        print(f"{'wrote' if name in wanted else 'removed'} {target.relative_to(PROTO.parent)}")
    return 0


def generate(folder: Path) -> None:
    """Writes what the generator makes of every `.proto` file into `folder`."""
    python = small_environment("proto-tools", GENERATOR)
    protos = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    services = [str(PACKAGE / name) for name in WITH_SERVICES]
    base = [str(python), "-m", "grpc_tools.protoc", "-I."]
    for outputs, files in (
        ([f"--python_out={folder}", f"--pyi_out={folder}"], protos),
        ([f"--grpc_python_out={folder}"], services),
    ):
        subprocess.run([*base, *outputs, *files], cwd=PROTO, check=True)


def modules(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for pattern in PATTERNS for path in folder.glob(pattern)}


if __name__ == "__main__":
    sys.exit(main())
