"""What a large host costs: the page says what the command prints, the arithmetic is right where known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import simulate
from benchmarks.simulate import Costs, Host, Row

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


def row(host: Host, beginning: str, costs: Costs | None = None) -> Row:
    [found] = [one for one in simulate.rows(host, costs or Costs()) if one.what.startswith(beginning)]
    return found


def test_the_page_has_the_table_that_the_command_prints() -> None:
    printed = CliRunner().invoke(simulate.main, ["--defaults", "--markdown"]).output
    assert printed in simulate.PAGE.read_text(), "run python -m benchmarks.simulate --write"
    assert simulate.PAGE.read_text() == simulate.page()


def test_what_is_furthest_beyond_its_limit_comes_first() -> None:
    loads = [one.load for one in simulate.rows(Host(), Costs())]
    assert loads == sorted(loads, reverse=True)
    assert len(loads) == len({one.what for one in simulate.rows(Host(), Costs())})


def test_page_tables_are_two_mebibytes_a_gibibyte_and_worker() -> None:
    host = Host(memory=TIB, engines=1, ranks=1)
    assert row(host, "page tables").value * GIB == 1024 * 2 * MIB
    assert row(replace(host, page=2 * MIB), "page tables").value * GIB == 1024 * 2 * MIB / 512


def test_index_populate_and_lookup_follow_their_unit_costs() -> None:
    host = Host(memory=64 * GIB, token_bytes=64 << 10, context=8192 * 16)
    assert row(host, "index").value * GIB == 65536 * 400
    assert row(host, "populate", Costs(populate_gb_s=2)).value == pytest.approx(64 * GIB / 2e9)
    assert row(host, "lookup of one prompt, 1 calls").value == pytest.approx(0.125 + 8192 * 0.4e-3)


def test_at_the_size_that_it_names_the_limit_is_reached() -> None:
    host = Host(engines=13, ranks=2)
    assert row(Host(), "page tables").breaks_at == "26 workers"
    assert row(host, "page tables").load == pytest.approx(1, rel=0.05)
    assert row(Host(memory=558 * GIB), "populate").load == pytest.approx(1, rel=0.01)


def test_a_small_host_breaks_nothing() -> None:
    small = Host(memory=64 * GIB, engines=2, ranks=1, token_bytes=64 << 10, context=32768)
    assert simulate.verdict(simulate.rows(small, Costs())).startswith("Nothing breaks")


def test_measured_costs_take_the_place_of_stated_ones(tmp_path: Path) -> None:
    results = tmp_path / "latest.json"
    results.write_text(json.dumps({"figures": {"requests_per_s": 10000, "index_bytes_per_chunk": 300}}))
    printed = CliRunner().invoke(simulate.main, ["--results", str(results), "--json"]).output
    told = json.loads(printed)
    assert told["costs"]["call_us"] == 100
    assert told["costs"]["index_bytes"] == 300
    assert told["costs"]["key_us"] == Costs().key_us
    assert told["measured"] == ["call_us", "index_bytes"]


def test_a_wrong_size_is_refused_in_a_sentence() -> None:
    told = CliRunner().invoke(simulate.main, ["--memory", "2 elephants"])
    assert told.exit_code == 2
    assert "elephants" in told.output
