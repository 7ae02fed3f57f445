"""The Dockerfile, as far as it can be tried without building it."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support import ROOT
from tests.support.files.command_lines import parse
from tests.support.files.deployment import Instruction, image_environment, stages, unknown_settings
from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom
from tools.write_lock import EXTRAS, PYTHON, locked
from trocar._cli import main
from trocar_server.config import read_config

ARGUMENTS, BUILD, FINAL = stages()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def instructions(name: str, stage: list[Instruction] = FINAL) -> list[Instruction]:
    return [entry for entry in stage if entry.name == name]


def test_all_of_what_the_wheel_is_built_from_gets_into_the_build() -> None:
    sent = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert "*" in IGNORED
    assert [name for name in sent if not (ROOT / name).exists()] == []
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {path.split("/")[0] for path in packages} | {"pyproject.toml", PROJECT["project"]["readme"]}
    assert needed | set(PROJECT["project"]["license-files"]) <= sent


def test_every_source_of_a_copy_exists() -> None:
    for copy in instructions("COPY", BUILD):
        *sources, _ = copy.text.split()
        assert [source for source in sources if not (ROOT / source).exists()] == []
    (copied,) = instructions("COPY")
    assert copied.text == "--from=build /opt/trocar /opt/trocar"
    assert any("-m venv /opt/trocar" in run.text for run in instructions("RUN", BUILD))


def test_the_extras_that_are_installed_exist() -> None:
    installed = " ".join(run.text for run in instructions("RUN", BUILD))
    assert '".[${EXTRAS}]"' in installed
    (extras,) = [entry.text for entry in instructions("ARG", BUILD) if entry.text.startswith("EXTRAS=")]
    names = extras.removeprefix("EXTRAS=").split(",")
    assert "server" in names
    assert set(names) <= set(EXTRAS) <= set(PROJECT["project"]["optional-dependencies"])


def test_only_wheels_of_the_lock_are_installed() -> None:
    (install,) = [run.text for run in instructions("RUN", BUILD) if "pip install" in run.text]
    assert "--no-index --find-links /wheels --constraint constraints.txt" in install
    (download,) = [run.text for run in instructions("RUN", BUILD) if "pip download" in run.text]
    assert "--require-hashes --requirement requirements.lock" in download.rpartition("fi ")[2]


def test_another_torch_leaves_out_torch_and_its_libraries_and_nothing_else() -> None:
    (download,) = [run.text for run in instructions("RUN", BUILD) if "pip download" in run.text]
    (pattern,) = re.findall(r"sed -i -E '/(\S+)/d'", download)
    left_out = {name for name, version in locked().items() if re.search(pattern, f"{name}=={version}")}
    marked = {name for name in locked() if name.startswith(("nvidia-", "cuda-"))}
    assert marked
    assert left_out == marked | {"torch", "torchvision", "triton"}


def test_both_stages_have_the_same_base_and_it_is_pinned_by_digest() -> None:
    assert [stage[0].text.split()[0] for stage in (BUILD, FINAL)] == ["${BASE_IMAGE}"] * 2
    (argument,) = instructions("ARG", ARGUMENTS)
    image = argument.text.removeprefix("BASE_IMAGE=")
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-bookworm@sha256:[0-9a-f]{64}", image)
    assert version
    assert f">={version[1]}" == PROJECT["project"]["requires-python"]
    assert version[1] == PYTHON  # whose wheels the lock has


def test_the_image_runs_as_a_user_without_rights_who_owns_the_data() -> None:
    (user,) = instructions("USER")
    uid, gid = user.text.split(":")
    assert int(uid) >= 10_000
    made = " ".join(run.text for run in instructions("RUN"))
    assert f"--uid {uid} --gid {gid}" in made
    assert f"install --directory --owner {uid} --group {gid} --mode 0700 /data" in made
    assert instructions("VOLUME")[0].text == image_environment()["TROCAR_DATA_DIR"] == "/data"


def test_its_label_has_the_version_of_the_project() -> None:
    assert f"VERSION={PROJECT['project']['version']}" in [entry.text for entry in instructions("ARG")]


def test_its_variables_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = image_environment()
    assert unknown_settings(environment) == set()
    for name, value in environment.items():
        if name.startswith("TROCAR_"):
            monkeypatch.setenv(name, value)
    config = read_config()
    assert [config.host, config.port, config.health_port] == ["0.0.0.0", 50051, 50052]
    assert instructions("EXPOSE")[0].text.split()[:2] == [str(config.port), str(config.health_port)]
    assert not config.insecure  # who wants that has to say it


def test_the_server_gets_the_signals_itself_and_its_command_exists() -> None:
    (entry,) = instructions("ENTRYPOINT")
    assert entry.words == ["trocar", "serve"]
    parse([*entry.words[1:], "resnet50", "--insecure"])
    assert PROJECT["project"]["scripts"]["trocar"]
    assert instructions("STOPSIGNAL")[0].text == "SIGTERM"


def test_the_health_check_works_against_a_server(tmp_path: Path) -> None:
    (check,) = instructions("HEALTHCHECK")
    program, *words = check.words
    port = image_environment()["TROCAR_HEALTH_PORT"]
    assert (program, words.count(f"localhost:{port}")) == ("trocar", 1)

    def code(port: int) -> Any:
        with pytest.raises(SystemExit) as stopped:
            main([word.replace("localhost:50052", f"localhost:{port}") for word in words])
        return stopped.value.code or 0

    models = {"identity": custom(Identity)}
    with capture_logs(), running_server(health_port=0, models=models, data_dir=tmp_path) as running:
        health_port = running.app.rpc.health_port
        assert code(health_port) == 0
    assert code(health_port) == 3
