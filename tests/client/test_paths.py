"""Where the sockets of one daemon stand."""

import pytest

from kvhost_client.errors import InvalidArgument
from kvhost_client.paths import beside, grpc_target


def test_the_other_sockets_stand_beside_the_first() -> None:
    paths = beside("/run/kvhost/kvhostd.sock")
    assert paths.cache == "/run/kvhost/kvhostd.sock"
    assert paths.admin == "/run/kvhost/kvhostd-admin.sock"
    assert paths.handover == "/run/kvhost/kvhostd-handover.sock"


def test_a_name_without_the_usual_ending_works_too() -> None:
    assert beside("/run/k").admin == "/run/k-admin.sock"


def test_a_relative_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert beside("run/k.sock").cache == "/run/k.sock"


def test_the_form_that_grpc_uses_is_understood() -> None:
    assert beside("unix:/run/k.sock").cache == "/run/k.sock"


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a socket path is needed"):
        beside("")


def test_a_path_that_no_socket_can_have_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(InvalidArgument, match="107 are possible"):
        beside("/" + "d" * 100 + "/k.sock")


def test_characters_that_mean_something_in_a_uri_are_escaped() -> None:
    assert grpc_target("/a b%20/k.sock") == "unix:/a%20b%2520/k.sock"
