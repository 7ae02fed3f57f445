"""The systemd unit: that systemd takes it, and that it agrees with the server."""

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.files.command_lines import parse
from tests.support.files.deployment import CHECKPOINTS_S, DEPLOY, memory, unknown_settings
from trocar_server.app.access import check_address
from trocar_server.config import read_config

SYSTEMD = DEPLOY / "systemd"
UNIT = SYSTEMD / "trocar.service"
DROP_INS = sorted((SYSTEMD / "trocar.service.d").glob("*.conf"))
ANALYZE = shutil.which("systemd-analyze")
EXPOSURE = 20
"""The most that `systemd-analyze security` may count, in tenths; 100 is a service without any hardening."""

needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")


def settings(path: Path = UNIT) -> dict[str, list[str]]:
    """Return what a unit sets, by key, whatever the section."""
    found = defaultdict(list)
    for line in path.read_text().splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            found[match[1]].append(match[2])
    return found


def environment(path: Path) -> dict[str, str]:
    words = [word for line in settings(path)["Environment"] for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


@needs_systemd
@pytest.mark.parametrize("drop_ins", [[], *([drop_in] for drop_in in DROP_INS), DROP_INS], ids=len)
def test_systemd_takes_the_unit(drop_ins: list[Path], tmp_path: Path) -> None:
    program = UNIT.read_text().replace("/opt/trocar/bin/trocar", shutil.which("true") or "")
    (tmp_path / "trocar.service").write_text(program)
    folder = tmp_path / "trocar.service.d"
    folder.mkdir()
    for drop_in in drop_ins:
        shutil.copy(drop_in, folder)
    command = [ANALYZE or "", "verify", "--man=no", str(tmp_path / "trocar.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""  # it says what it does not know, and exits with 0


@needs_systemd
def test_the_unit_is_hardened() -> None:
    options = ["--offline=true", f"--threshold={EXPOSURE}"]
    done = subprocess.run(
        [ANALYZE or "", "security", *options, str(UNIT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_its_command_exists() -> None:
    (command,) = settings()["ExecStart"]
    program, *words = command.split()
    assert Path(program).name == "trocar"
    parse(words)


def test_its_configuration_is_one_that_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(UNIT).items():
        if name.startswith("TROCAR_"):
            monkeypatch.setenv(name, value)
    config = read_config(SYSTEMD / "trocar.toml")
    check_address(config)
    (state,) = settings()["StateDirectory"]
    assert config.data_dir == Path("/var/lib") / state


@pytest.mark.parametrize("path", [UNIT, *DROP_INS], ids=lambda path: path.name)
def test_its_variables_are_settings(path: Path) -> None:
    assert unknown_settings(environment(path)) == set()


def test_with_tls_it_may_listen_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_in = SYSTEMD / "trocar.service.d" / "10-tls.conf"
    for name, value in environment(drop_in).items():
        monkeypatch.setenv(name, value)
    config = read_config(SYSTEMD / "trocar.toml")
    check_address(config)
    loaded = {entry.split(":")[0] for entry in settings(drop_in)["LoadCredential"]}
    assert config.tls_cert
    assert config.tls_key
    assert {config.tls_cert.name, config.tls_key.name} == loaded


def test_it_has_time_to_stop_and_memory_to_run() -> None:
    config = read_config(SYSTEMD / "trocar.toml")
    unit = settings()
    assert int(unit["TimeoutStopSec"][0]) >= config.grace_s + CHECKPOINTS_S
    high, most = (memory(unit[key][0]) for key in ("MemoryHigh", "MemoryMax"))
    assert 0 < config.limits.max_pass_bytes + config.limits.max_pending_bytes < high < most


def test_code_that_is_made_at_run_time_may_run() -> None:
    assert "MemoryDenyWriteExecute" not in settings()  # with it a convolution fails, see the unit
