"""What the documents tell people to type: programs, options, files and settings that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.options import check_command, check_transfer, command_lines

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")])
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(kvhost(?:d|ctl) [^`]+)`")
_SHELL = ("", "sh", "bash", "console")


def blocks(document: Path, *languages: str) -> list[str]:
    return [text for language, text in _BLOCK.findall(document.read_text()) if language in languages]


def shell(document: Path) -> list[str]:
    """Blocks that are typed; drawings have no letters at the start of a line that name a program of ours."""
    return blocks(document, *_SHELL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_our_programs_take_what_they_are_told(document: Path) -> None:
    typed = [*shell(document), *_INLINE.findall(_BLOCK.sub("", document.read_text()))]
    for text in typed:
        for words in command_lines(text.replace("…", "X").replace("...", "")):
            try:
                check_command(words)
            except AssertionError as error:
                raise AssertionError(f"{document.name}: {' '.join(words)}: {error}") from error


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_of_shell_can_be_parsed(document: Path) -> None:
    for text in shell(document):
        if not re.search(r"^(kvhost|curl|docker|pip|make|vllm|export|systemctl|kubectl)", text, re.MULTILINE):
            continue
        checked = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, check=False, timeout=10
        )
        assert checked.returncode == 0, f"{document.name}: {text}\n{checked.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_engines_are_told_what_vllm_and_the_connector_know(document: Path) -> None:
    for text in shell(document):
        for value in re.findall(r"--kv-transfer-config[ =]'(\{.*?\})'", text, re.DOTALL):
            check_transfer(json.loads(value))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(
        r"(?<![\w/.-])((?:deploy|examples|scripts|tests|proto|demo)/[\w./*-]*[\w*])",
        document.read_text(),
    )
    for name in named:
        assert list(ROOT.glob(name)), f"{document.name} names {name}"
