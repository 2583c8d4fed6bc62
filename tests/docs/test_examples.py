"""examples/: scripts that can be parsed, and that tell our programs and vLLM what they know. One of them runs
for real in tests/e2e/test_examples.py."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.options import check_command, check_transfer, command_lines

FOLDER = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_say_what_exists(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    text = script.read_text()
    for words in command_lines(text):
        check_command(words)
    for value in re.findall(r"'(\{\"kv_connector\".*?\})'", text):
        check_transfer(json.loads(value))
    if script.name != "common.sh":
        assert os.access(script, os.X_OK)
        assert f"| `{script.name}` |" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_programs_need_no_more_than_python(program: Path) -> None:
    """They are copied, and run wherever an engine can be reached."""
    imported = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= {*sys.stdlib_module_names, *(path.stem for path in PROGRAMS)}
    asked = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert asked.returncode == 2
    assert "http://127.0.0.1:8000" in asked.stderr


def test_a_daemon_that_cannot_start_ends_the_script_and_says_why(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        [str(FOLDER / "restart.sh")],
        env={"PATH": path, "MEMORY": "none", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1
    assert "'none' is not a size" in run.stderr
    assert list(tmp_path.iterdir()) == []
