"""The documentation as a site: built without a warning, complete, and fetching nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from kvhost_proto.v1 import admin_pb2, cache_pb2, common_pb2, handover_pb2
from scripts import protocol_page, site


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "SITE", folder / "site")
        patch.setattr(site, "SOURCE", folder / "source")
        site.build()
    return folder / "site"


class Page(HTMLParser):
    """What one page refers to, and what can be referred to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(found["href"])
        elif "src" in found:
            self.fetched.append(found["src"])


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in built.rglob("*.html")}


def test_every_page_of_the_repository_is_there(built: Path) -> None:
    for source, name in site.sources().items():
        folder = "" if name == "index.md" else name.removesuffix(".md")
        assert (built / folder / "index.html").is_file(), source


def test_nothing_is_fetched_from_elsewhere(built: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.fetched
        for address in page.fetched:
            assert not urlsplit(address).scheme or address.startswith("data:"), f"{path.name}: {address}"
            assert not address.startswith("//")
    for sheet in built.rglob("*.css"):
        addresses = re.findall(r"url\(([^)]+)\)|@import ([^;]+)", sheet.read_text())
        assert not [found for found in addresses if re.match(r"[\"']?(https?:)?//", "".join(found))], sheet


def test_every_link_inside_the_site_leads_somewhere(built: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            assert target.is_file(), f"{path.relative_to(built)}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.relative_to(built)}: {link}"


def test_a_new_page_has_a_place_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stray.md").write_text("# A stray page\n")
    monkeypatch.setattr(site, "DOCS", tmp_path)
    assert list(site.sections())[-1] == ("More", [("A stray page", "docs/stray.md")])
    assert site.sources()["docs/stray.md"] == "stray.md"


def test_a_link_that_the_site_cannot_follow_is_an_error() -> None:
    with pytest.raises(site.SiteError, match="which is no page of the site"):
        site.translated("docs/faq.md", "see [it](../pyproject.toml)", site.sources())
    there = site.translated("docs/faq.md", "see [it](../SECURITY.md#reporting)", site.sources())
    assert there == "see [it](security.md#reporting)"


class TestProtocolPage:
    def test_everything_on_the_wire_is_described(self) -> None:
        text = protocol_page.page()
        for module in (admin_pb2, cache_pb2, common_pb2, handover_pb2):
            file = module.DESCRIPTOR
            section = text.split(f"## {Path(file.name).name}\n")[1].split("\n## ")[0]
            blocks = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL))
            assert set(blocks) == {
                *file.services_by_name,
                *file.message_types_by_name,
                *file.enum_types_by_name,
            }
            for name, service in file.services_by_name.items():
                for method in service.methods:
                    assert f"| `{method.name}` |" in blocks[name]
            for name, message in file.message_types_by_name.items():
                for described in message.fields:
                    assert f"| {described.number} | `{described.name}` |" in blocks[name]
            for name, enum in file.enum_types_by_name.items():
                for value in enum.values:
                    assert f"| {value.number} | `{value.name}` |" in blocks[name]

    def test_comments_come_along(self) -> None:
        text = "// What it is,\n// at length.\nmessage It {\n  bytes one = 1;  // behind\n}\n"
        [block] = protocol_page.parse(text, "it").blocks
        assert (block.name, block.about) == ("It", "What it is, at length.")
        assert [(row.cells, row.about) for row in block.rows] == [(("1", "`one`", "`bytes`"), "behind")]

    def test_a_line_of_another_dialect_is_an_error(self) -> None:
        with pytest.raises(protocol_page.UnknownLine, match=r"it.proto, line 2: group G = 1"):
            protocol_page.parse('syntax = "proto2";\ngroup G = 1 {', "it")
