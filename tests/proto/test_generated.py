"""The committed modules are what the `.proto` files give."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import gen_proto

# The generator's environment is made at first use.
pytestmark = pytest.mark.timeout(300)


def test_committed_modules_are_current() -> None:
    assert gen_proto.main(["--check"]) == 0


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(gen_proto.PROTO, tmp_path / "proto")
    monkeypatch.setattr(gen_proto, "PROTO", tmp_path / "proto")
    return tmp_path / "proto" / gen_proto.PACKAGE


def test_a_changed_proto_file_is_noticed_and_mended(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = copy / "common.proto"
    proto.write_text(proto.read_text() + "\nmessage Added {\n  bytes key = 1;\n}\n")

    assert gen_proto.main(["--check"]) == 1
    assert "common_pb2.py is not what the .proto files give: run `make proto`" in capsys.readouterr().err

    assert gen_proto.main([]) == 0
    assert "Added" in (copy / "common_pb2.pyi").read_text()
    assert gen_proto.main(["--check"]) == 0


def test_a_module_nobody_generates_is_noticed_and_removed(copy: Path) -> None:
    stray = copy / "gone_pb2.py"
    stray.write_text("old = True\n")

    assert gen_proto.main(["--check"]) == 1
    assert gen_proto.main([]) == 0
    assert not stray.exists()
