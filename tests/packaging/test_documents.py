"""What the documents say is what is there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import configuration_page

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_configuration_page_is_what_the_code_says() -> None:
    assert configuration_page.main(["--check"]) == 0


def test_the_configuration_file_shown_is_accepted(tmp_path: Path) -> None:
    text = configuration_page.PAGE.read_text()
    [example] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "kvhost.toml"
    file.write_text(example)
    command = [sys.executable, "-m", "kvhost_server", "--config", str(file), "--print-config"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 'memory = "8GiB"' in printed


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for group in (
        *project["dependency-groups"].values(),
        *project["project"]["optional-dependencies"].values(),
    ):
        wanted += group
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in wanted:
        name = re.split(r"[<>=!~\[;]", requirement)[0]
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", page), (
            f"{name} is not in docs/dependencies.md"
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if not target.startswith("https://"):
            assert (document.parent / target).exists(), f"{document.name} names {target}"


def test_make_targets_that_documents_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*)\b", document.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name} names make {target}"
