"""SIGHUP: what a running daemon takes from its configuration, and what it says of the rest."""

import json
import signal
from pathlib import Path

from tests.client.engine import Engine
from tests.support import Daemon, wait_for

BASE = 'log-level = "info"\n'


def hang_up(daemon: Daemon, file: Path, text: str) -> None:
    file.write_text(text)
    daemon.process.send_signal(signal.SIGHUP)


def test_a_running_daemon_takes_what_it_can_and_says_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "kvhost.toml"
    file.write_text(BASE)
    with Daemon("4MiB", ["--config", str(file)]) as daemon:
        hang_up(daemon, file, BASE)
        daemon.wait_log("SIGHUP: nothing changed")
        hang_up(daemon, file, 'log-level = "debug"\nallow-uid = ["12345"]\nlock = "auto"\n')
        log = daemon.wait_log("SIGHUP: lock")
        assert 'SIGHUP: log_level is "debug" now; it was "info"' in log
        assert 'SIGHUP: allow_uid is ["12345"] now; it was []' in log
        assert 'SIGHUP: lock = "auto" needs a restart; it stays "off"' in log
        config = daemon.status().config
        assert (config["log_level"], config["lock"]) == ("debug", "off")
        assert daemon.status().config_sources["log_level"] == f"file {file}"
        hang_up(daemon, file, 'log-levle = "debug"\n')
        log = daemon.wait_log("the configuration stays as it was")
        assert "unknown key 'log-levle'; the nearest known one is 'log_level'" in log
        assert daemon.status().config["log_level"] == "debug"
        hang_up(daemon, file, BASE)
        daemon.wait_log('log_level is "info" now')
        assert daemon.stop() == 0


def test_a_flag_stays_above_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvhost.toml"
    file.write_text(BASE)
    with Daemon("4MiB", ["--config", str(file), "--log-level", "warning"]) as daemon:
        hang_up(daemon, file, 'log-format = "json"\nlog-level = "debug"\n')
        wait_for(lambda: daemon.status().config["log_format"] == "json")
        assert daemon.status().config["log_level"] == "warning"


def test_json_lines_have_session_and_namespace_as_fields() -> None:
    with Daemon("4MiB", ["--log-format", "json"]) as daemon:
        with Engine(daemon.socket) as engine:
            number, namespace = engine.session.number, engine.declared.namespace_number
        daemon.wait_log("its stream was closed")
        records = [json.loads(line) for line in daemon.log.splitlines()]
    [entered] = [record for record in records if "is in namespace" in record["message"]]
    assert (entered["session"], entered["namespace"]) == (number, namespace)
    [ended] = [record for record in records if "stream was closed" in record["message"]]
    assert ended["session"] == number and "namespace" not in ended
