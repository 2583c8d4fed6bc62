"""Builds the documentation as a site into `build/site`: the pages of docs/, those of the root, the protocol.

The pages are written to be read in the repository; here they are gathered into one folder, and what they say
of each other's places is put right. Warnings of mkdocs are errors.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from scripts import protocol_page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "site"
SOURCE = ROOT / "build" / "site-source"

PAGES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Start", (("kvhost", "README.md"), ("Quick start", "docs/quickstart.md"), ("FAQ", "docs/faq.md"))),
    (
        "Engines",
        (
            ("CUDA, ROCm, XPU", "docs/cuda.md"),
            ("TPU", "docs/tpu.md"),
            ("TPU: parity", "docs/parity.md"),
        ),
    ),
    (
        "Operate",
        (
            ("Operations", "docs/operations.md"),
            ("Configuration", "docs/configuration.md"),
            ("Metrics", "docs/metrics.md"),
            ("Runbook", "docs/runbook.md"),
            ("Security", "SECURITY.md"),
        ),
    ),
    (
        "Understand",
        (
            ("Architecture", "docs/design.md"),
            ("Protocol", "docs/protocol.md"),
            ("Reliability", "docs/reliability.md"),
            ("Claims", "docs/claims.md"),
            ("Beside other caches", "docs/peers.md"),
            ("Scale", "docs/scale.md"),
        ),
    ),
    (
        "Contribute",
        (
            ("Contributing", "CONTRIBUTING.md"),
            ("Dependencies", "docs/dependencies.md"),
            ("Changes", "CHANGELOG.md"),
        ),
    ),
)
"""Sections, titles, and the files as they lie in the repository. Those that are not there are left out; pages
of docs/ that are not here come last, under their own headings."""
GENERATED = "docs/protocol.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


class SiteError(Exception):
    """One sentence for the person who ran `make docs`."""


def page_name(source: str) -> str:
    """A file of the repository -> its name in the site."""
    name = Path(source).name
    return "index.md" if name == "README.md" else name.lower()


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections as they come to be: title, and (title, file) of each page."""
    placed = set()
    for title, entries in PAGES:
        there = [(name, path) for name, path in entries if path == GENERATED or (ROOT / path).exists()]
        placed |= {path for _, path in there}
        if there:
            yield title, there
    others = [path for path in sorted(DOCS.glob("*.md")) if f"docs/{path.name}" not in placed]
    if others:
        yield (
            "More",
            [(path.read_text().splitlines()[0].lstrip("# "), f"docs/{path.name}") for path in others],
        )


def sources() -> dict[str, str]:
    """Every page: file in the repository -> name in the site."""
    return {path: page_name(path) for _, entries in sections() for _, path in entries}


def navigation() -> list[dict[str, list[dict[str, str]]]]:
    """As mkdocs wants it."""
    return [{title: [{name: page_name(path)} for name, path in entries]} for title, entries in sections()]


def translated(source: str, text: str, known: dict[str, str]) -> str:
    """A page with its links as they must be in the site.

    Raises:
        SiteError: it links a file that the site does not have.
    """

    def target(found: re.Match[str]) -> str:
        before, link, anchor, after = found.groups()
        if re.match(r"[a-z]+:", link):
            return found[0]
        path = (ROOT / source).parent.joinpath(link).resolve().relative_to(ROOT).as_posix()
        if path in known:
            return f"{before}{known[path]}{anchor or ''}{after}"
        if path == "LICENSE":
            return f"{before}license.txt{after}"
        if path.startswith("docs/") and (ROOT / path).is_file():
            return f"{before}{path.removeprefix('docs/')}{after}"
        raise SiteError(f"{source} links {link}, which is no page of the site; write it as code instead")

    return _LINK.sub(target, text)


def gather(folder: Path) -> None:
    """Everything that mkdocs needs, into an empty folder."""
    known = sources()
    pages = folder / "pages"
    pages.mkdir(parents=True)
    for source, name in known.items():
        text = protocol_page.page() if source == GENERATED else (ROOT / source).read_text()
        (pages / name).write_text(translated(source, text, known))
    for path in DOCS.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            target = pages / path.relative_to(DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    shutil.copy2(ROOT / "LICENSE", pages / "license.txt")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config |= {"docs_dir": "pages", "site_dir": str(SITE), "nav": navigation()}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))


def build() -> None:
    """The site, from nothing.

    Raises:
        SiteError: mkdocs warned, or failed.
    """
    folder = SOURCE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    gather(folder)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--quiet"]
    command += ["--config-file", str(folder / "mkdocs.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if result.returncode != 0:
        raise SiteError(f"mkdocs ended with code {result.returncode}:\n{result.stdout}{result.stderr}")


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="site", description=__doc__).parse_args(arguments)
    try:
        build()
    except SiteError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    print(f"docs: {SITE.relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
