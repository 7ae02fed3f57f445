"""What `trocar doctor` finds, against machines and files that are broken in a known way."""

import importlib
import json
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner

from tests.support.servers.certificates import OPENSSL, authority, signed
from tests.support.servers.running_server import running_server
from trocar_server.auth import Scope, TokenFile
from trocar_server.config import DatasetConfig, ModelConfig, ServerConfig, WarmVariantConfig
from trocar_server.doctor import (
    Finding,
    Level,
    access_checks,
    configuration_checks,
    environment_checks,
    examine,
    machine_checks,
    storage_checks,
)
from trocar_server.doctor.certificates import validity_of, validity_of_authorities
from trocar_server.doctor.command import doctor
from trocar_server.doctor.running import CHECKS
from trocar_server.doctor.server_checks import Target, check_server
from trocar_server.engine.compiled.backends import availability
from trocar_server.storage.data_lock import lock_folder
from trocar_server.storage.folder_lease import new_holder, take_lease

DAY_S = 86_400
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")


def config(tmp_path: Path, **settings: Any) -> ServerConfig:
    return ServerConfig(**{"data_dir": tmp_path, "device": "cpu", "port": 0, **settings})


def levels(findings: Iterator[Finding]) -> list[Level]:
    found = list(findings)
    for finding in found:
        assert finding.text
        assert bool(finding.advice) == (finding.level is not Level.OK), finding
    return [finding.level for finding in found]


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_every_check_of_the_package_is_in_the_list() -> None:
    modules = (access_checks, configuration_checks, environment_checks, machine_checks, storage_checks)
    functions = {
        f"{module.__name__.rpartition('.')[2]}:{name}"
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("check_") and getattr(value, "__module__", "") == module.__name__
    }
    assert functions == set(CHECKS)


def test_a_sound_machine_has_nothing_that_fails(tmp_path: Path) -> None:
    findings = list(examine(config(tmp_path, models={"resnet18": ModelConfig(weights="random:0")})))
    assert [finding for finding in findings if finding.level is Level.FAIL] == []
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_check_that_breaks_down_stops_no_other(tmp_path: Path) -> None:
    findings = list(examine(config(tmp_path), ("nothing:check_it", "environment_checks:check_python")))
    assert [finding.level for finding in findings] == [Level.FAIL, Level.OK]
    assert "ModuleNotFoundError" in findings[0].text


def test_a_package_that_is_too_old_or_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "grpcio":
            raise PackageNotFoundError(name)
        return "0.1"

    monkeypatch.setattr(environment_checks, "version", version)
    by_name = {finding.subject: finding for finding in environment_checks.check_packages(config(tmp_path))}
    assert by_name["grpcio"].text == "not installed"
    assert by_name["protobuf"].level is Level.FAIL
    assert "6.33.5" in by_name["protobuf"].text
    assert "pytest" not in by_name  # of another extra


def test_torch_and_torchvision_that_do_not_fit_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(importlib, "import_module", broken)
    found = only(environment_checks.check_torch(config(tmp_path)))
    assert found.level is Level.FAIL
    assert "nms does not exist" in found.text


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there_fails(tmp_path: Path, device: str) -> None:
    assert levels(machine_checks.check_device(config(tmp_path, device=device))) == [Level.FAIL]


def test_more_threads_than_cores_are_too_many(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert levels(machine_checks.check_device(config(tmp_path, threads=cores))) == [Level.OK]
    assert levels(machine_checks.check_device(config(tmp_path, threads=cores + 1))) == [Level.OK, Level.WARN]


def test_the_memory_is_the_cgroups_where_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "cgroup_limit", lambda: None)
    assert "machine" in only(machine_checks.check_memory(config(tmp_path))).text
    monkeypatch.setattr(machine_checks, "cgroup_limit", lambda: 1 << 30)
    found = only(machine_checks.check_memory(config(tmp_path)))
    assert (found.level, found.text) == (Level.WARN, "1.0 GiB (the cgroup's)")
    greedy = config(tmp_path, limits={"max_pass_bytes": 2 << 30})
    assert levels(machine_checks.check_memory(greedy)) == [Level.WARN, Level.WARN]


def test_few_files_and_a_clock_of_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert levels(machine_checks.check_open_files(config(tmp_path))) == [Level.WARN]
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert levels(machine_checks.check_clock(config(tmp_path))) == [Level.FAIL]


def test_shared_memory_that_is_small_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_SHARED", tmp_path / "none")
    assert levels(machine_checks.check_shared_memory(config(tmp_path))) == [Level.WARN]
    monkeypatch.setattr(machine_checks, "_SHARED", tmp_path)
    monkeypatch.setattr(machine_checks, "_LITTLE_SHARED", 1 << 62)
    assert levels(machine_checks.check_shared_memory(config(tmp_path))) == [Level.WARN]


def test_a_data_directory_that_is_no_folder_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert levels(storage_checks.check_data_dir(config(tmp_path, data_dir=file))) == [Level.FAIL]
    assert levels(storage_checks.check_data_dir(config(tmp_path, data_dir=tmp_path / "new" / "one"))) == [
        Level.OK
    ]
    assert not (tmp_path / "new").exists()


def test_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "_LITTLE_ROOM", 1 << 62)
    assert levels(storage_checks.check_room(config(tmp_path))) == [Level.WARN]


def test_the_server_that_has_the_data_directory_is_named(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "trainers")
    found = only(storage_checks.check_lock(config(tmp_path)))
    assert found.level is Level.WARN
    assert str(os.getpid()) in found.text
    lock.release()
    assert levels(storage_checks.check_lock(config(tmp_path))) == [Level.OK]
    lock_folder(tmp_path / "trainers").release()  # looking has not taken it


@pytest.mark.parametrize("shared", ["data", "trainers"])
def test_the_cluster_that_has_the_data_directory_or_its_trainers_is_named(
    tmp_path: Path, shared: str
) -> None:
    folders = {"data_dir": tmp_path / "data", "cluster": {"trainers_dir": tmp_path / "trainers"}}
    lease = take_lease(tmp_path / shared, new_holder("a" * 32, "10.0.0.1:6379"))
    found = only(storage_checks.check_lease(config(tmp_path, **folders)))
    assert found.level is Level.WARN
    assert f"10.0.0.1:6379, started on {socket.gethostname()}" in found.text
    lease.release()
    assert levels(storage_checks.check_lease(config(tmp_path, **folders))) == [Level.OK]


def test_leftovers_count_once_they_are_a_day_old(tmp_path: Path) -> None:
    fresh, old = tmp_path / "a.partial", tmp_path / "weights" / "b.partial"
    old.parent.mkdir()
    fresh.touch()
    old.write_bytes(bytes(1 << 20))
    assert levels(storage_checks.check_leftovers(config(tmp_path))) == [Level.OK]
    then = time.time() - 2 * DAY_S
    os.utime(old, (then, then))
    found = only(storage_checks.check_leftovers(config(tmp_path)))
    assert found.level is Level.WARN
    assert "1 files, 1 MiB" in found.text
    assert "weights/b.partial" in found.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "trocar.example"])
def test_an_address_that_others_reach_needs_authentication(tmp_path: Path, host: str) -> None:
    assert levels(access_checks.check_open_to(config(tmp_path, host=host))) == [Level.FAIL]
    assert levels(access_checks.check_open_to(config(tmp_path, host=host, insecure=True))) == [Level.WARN]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "may call every method"),
        ({"tokens": True}, "in plain text"),
        ({"host": "127.0.0.1"}, "not needed"),
    ],
)
def test_insecure_says_what_it_gives_away(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    found = only(
        access_checks.check_open_to(config(tmp_path, **{"host": "0.0.0.0", "insecure": True, **settings}))
    )
    assert found.level is Level.WARN
    assert said in found.text


def test_the_data_directory_may_be_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROCAR_DATA_DIR", str(tmp_path / "elsewhere"))
    app = typer.Typer()
    app.command()(doctor)
    shown = CliRunner().invoke(app, ["--data-dir", str(tmp_path / "here"), "--json"]).stdout
    found = [finding["text"] for finding in json.loads(shown)["findings"] if finding["subject"] == "data_dir"]
    assert any(str(tmp_path / "here") in text for text in found)


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert levels(access_checks.check_port(config(tmp_path, port=port))) == [Level.WARN]
    assert levels(access_checks.check_port(config(tmp_path))) == [Level.OK]
    assert levels(access_checks.check_port(config(tmp_path, host=f"unix:{tmp_path}/s"))) == [Level.OK]
    assert levels(access_checks.check_port(config(tmp_path, host=f"unix:{tmp_path}/none/s"))) == [Level.FAIL]


def test_tokens_that_are_missing_expiring_or_open_to_others(tmp_path: Path) -> None:
    asked, file, now = config(tmp_path, tokens=True), TokenFile(tmp_path), time.time()
    assert levels(access_checks.check_tokens(config(tmp_path))) == []
    assert levels(access_checks.check_tokens(asked)) == [Level.WARN]
    file.add("alice", [Scope.RUN], expires_at_s=None, now_s=now)
    assert levels(access_checks.check_tokens(asked)) == [Level.OK]
    assert levels(access_checks.check_tokens(config(tmp_path))) == [Level.WARN]  # made, and nobody is asked
    file.add("bob", [Scope.RUN], expires_at_s=int(now + DAY_S), now_s=now)
    found = list(access_checks.check_tokens(asked))
    assert [finding.level for finding in found] == [Level.OK, Level.WARN]
    assert "'bob'" in found[1].text
    file.path.chmod(0o644)
    assert levels(access_checks.check_tokens(asked)) == [Level.FAIL]


@needs_openssl
def test_certificates_are_judged_by_their_dates_and_their_key(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    server, other = signed(ca, tmp_path, "server"), signed(ca, tmp_path, "other")
    settings: dict[str, Any] = {"tls_cert": server.certificate, "tls_client_ca": ca.certificate}
    assert levels(access_checks.check_certificates(config(tmp_path))) == []
    found = list(access_checks.check_certificates(config(tmp_path, tls_key=server.key, **settings)))
    assert [finding.level for finding in found] == [Level.WARN, Level.WARN]  # two days are not long
    assert "localhost, 127.0.0.1" in found[0].text
    assert levels(access_checks.check_certificates(config(tmp_path, tls_key=other.key, **settings))) == [
        Level.FAIL
    ]
    left = validity_of(server.certificate, server.key).ends_at_s - time.time()
    assert 1.9 * DAY_S < left <= 2 * DAY_S
    assert validity_of_authorities(ca.certificate).names == "authority"


@needs_openssl
def test_an_expired_certificate_and_one_with_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = signed(authority(tmp_path), tmp_path, "server")
    settings = config(tmp_path, tls_cert=server.certificate, tls_key=server.key)
    monkeypatch.setattr(access_checks, "_SOON_S", 3600)
    assert levels(access_checks.check_certificates(settings)) == [Level.OK]

    def expired(*_: Path) -> None:
        error = ssl.SSLCertVerificationError(1, "verify failed")
        error.verify_message = "certificate has expired"
        raise error

    monkeypatch.setattr(access_checks, "validity_of", expired)
    found = only(access_checks.check_certificates(settings))
    assert (found.level, "certificate has expired" in found.text) == (Level.FAIL, True)


def test_models_and_data_sets_that_are_not_there(tmp_path: Path) -> None:
    models = {
        "random": ModelConfig(architecture="resnet18", weights="random:0"),
        "unknown": ModelConfig(architecture="resnet9000"),
        "missing": ModelConfig(architecture="resnet18", weights=str(tmp_path / "no.safetensors")),
        "resnet18": ModelConfig(),
    }
    found = levels(configuration_checks.check_models(config(tmp_path, models=models)))
    assert found == [Level.OK, Level.FAIL, Level.FAIL, Level.WARN]
    (tmp_path / "good" / "cats").mkdir(parents=True)
    (tmp_path / "flat").mkdir()
    datasets = {name: DatasetConfig(path=tmp_path / name) for name in ("good", "flat", "none")}
    found = levels(configuration_checks.check_datasets(config(tmp_path, datasets=datasets)))
    assert found == [Level.OK, Level.FAIL, Level.FAIL]


def test_warm_variants_that_cannot_be_built_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(tap: str, **engine: Any) -> Finding:
        wanted = WarmVariantConfig(taps=(tap,), numerics="bf16")
        models = {"resnet18": ModelConfig(weights="random:0", warm_variants=(wanted,))}
        return only(configuration_checks.check_warm_variants(config(tmp_path, models=models, engine=engine)))

    monkeypatch.setattr(availability, "is_installed", lambda: True)
    assert checked("layer4").level is Level.OK
    malformed = checked("layer4@x")
    assert malformed.level is Level.FAIL
    assert "layer4@x" in malformed.text
    assert "compile_after = 0" in checked("layer4", compile_after=0).text
    monkeypatch.setattr(availability, "is_installed", lambda: False)
    missing = checked("layer4")
    assert missing.level is Level.WARN
    assert "OpenVINO is not installed" in missing.text


def test_a_running_server_is_asked(tmp_path: Path) -> None:
    with running_server(data_dir=tmp_path, device="cpu") as running:
        found = list(check_server(Target(running.address)))
        subjects = [finding.subject for finding in found]
        assert subjects[:3] == ["server", "versions", "server's device"]
        assert {"server's training", "server's models", "server's tls"} <= set(subjects[3:])
        assert found[1].level is Level.OK
    assert levels(check_server(Target(running.address))) == [Level.FAIL]


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [
        ("gpu.example.org:50051", True),
        ("192.0.2.7:50051", True),
        ("127.0.0.1:50051,192.0.2.7:50051", True),
        ("localhost.example.org:50051", True),
        ("127.0.0.1:50051", False),
        ("127.1.2.3:50051", False),
        ("[::1]:50051", False),
        ("localhost:50051", False),
        ("unix:/run/trocar.sock", False),
    ],
)
def test_a_token_crosses_no_network_in_plain_text(
    monkeypatch: pytest.MonkeyPatch, address: str, is_refused: bool
) -> None:
    opened: list[str] = []

    def open_channel(target: str, *_: object) -> grpc.Channel:
        opened.append(target)
        raise ConnectionError

    monkeypatch.setattr(grpc, "insecure_channel", open_channel)
    monkeypatch.setattr(grpc, "secure_channel", open_channel)
    if is_refused:
        found = only(check_server(Target(address, "the token")))
        assert found.level is Level.FAIL
        assert "in plain text" in found.text
        assert "--tls" in found.advice
        assert opened == []
    allowed = [Target(address), Target(address, "t", tls=True), Target(f"https://{address}", "t")]
    for target in allowed if is_refused else [*allowed, Target(address, "t")]:
        with pytest.raises(ConnectionError):
            list(check_server(target))
    assert set(opened) == {address}


@needs_openssl
def test_a_server_with_tls_is_asked_with_its_authority_or_that_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = authority(tmp_path)
    server = signed(ca, tmp_path, "server")
    tls: dict[str, Any] = {"tls_cert": server.certificate, "tls_key": server.key}
    with running_server(data_dir=tmp_path / "data", device="cpu", **tls) as running:
        assert Level.FAIL in levels(check_server(Target(running.address, tls=True)))
        assert Level.FAIL not in levels(check_server(Target(running.address, "t", ca=ca.certificate)))


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.1.7", Level.OK), ("0.0.9", Level.FAIL), ("0.2.0", Level.WARN), ("1.0.0", Level.FAIL)],
)
def test_versions_that_do_not_fit(version: str, level: Level) -> None:
    from trocar_server.doctor.server_checks import _skew

    assert _skew(version).level is level


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    import typer

    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, arguments)


def test_the_command_says_it_as_json_and_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROCAR_DATA_DIR", str(tmp_path))
    done = run(monkeypatch, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == int(report["worst"] == "FAIL")
    assert {finding["level"] for finding in report["findings"]} <= {"OK", "WARN", "FAIL"}
    file = tmp_path / "bad.toml"
    file.write_text("[server]\nport = 'x'\n")
    done = run(monkeypatch, "--config", str(file))
    assert done.exit_code == 1
    assert "FAIL  configuration: the configuration is invalid: port" in done.stdout
    assert "-> correct it" in done.stdout
