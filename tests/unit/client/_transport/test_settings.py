"""Where a connection's server and credentials come from, and how addresses are read."""

from __future__ import annotations

from pathlib import Path

import pytest

import trocar
from trocar._transport.profiles import Profile, Profiles, profiles_file, read_profiles, write_profiles
from trocar._transport.settings import connect_settings
from trocar._transport.targets import with_default_port
from trocar._transport.tls_mistakes import tls_advice


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("TROCAR_SERVER", "TROCAR_TOKEN", "TROCAR_CA", "TROCAR_PROFILE"):
        monkeypatch.delenv(name, raising=False)


LAB = Profile("lab:50051", "secret", ca="/ca.pem")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("gpu1", ("gpu1:50051", None)),
        (" gpu1:7 ", ("gpu1:7", None)),
        ("a,b:7", ("a:50051,b:7", None)),
        ("[::1]", ("[::1]:50051", None)),
        ("[::1]:7", ("[::1]:7", None)),
        ("::1", ("[::1]:50051", None)),
        ("ipv4:10.0.0.1,10.0.0.2:7", ("ipv4:10.0.0.1:50051,10.0.0.2:7", None)),
        ("dns:///gpu1", ("dns:///gpu1:50051", None)),
        ("dns:gpu1:7", ("dns:gpu1:7", None)),
        ("unix:/run/t.sock", ("unix:/run/t.sock", None)),
        ("http://gpu1", ("gpu1:50051", False)),
        ("https://gpu1:443/", ("gpu1:443", True)),
        ("local", ("local", None)),
    ],
)
def test_an_address_gets_a_port_and_says_tls(written: str, expected: tuple[str, bool | None]) -> None:
    assert with_default_port(written) == expected


@pytest.mark.parametrize(
    ("written", "cure"),
    [
        ("", "write host:port"),
        ("gpu1:", "is not a port, 1 to 65535; write for example localhost:50051"),
        ("gpu1:http", "'http' is not a port"),
        ("gpu1:99999", "'99999' is not a port"),
        ("ftp://gpu1", "write host:port, or https://host:port"),
        ("https://gpu1/models", "a server has no path and no user name; write https://host:port"),
        ("https://me:pw@gpu1", "no user name"),
        ("/run/t.sock", "write unix:/run/t.sock"),
        ("a,,b", "one of the addresses is empty"),
    ],
)
def test_what_is_no_address_says_what_to_write(written: str, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        with_default_port(written)


def test_the_argument_is_before_the_environment_before_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_settings().target == "localhost:50051"
    write_profiles(Profiles("lab", {"lab": LAB}))
    found = connect_settings()
    assert (found.target, found.token, found.origin) == ("lab:50051", "secret", "profile lab")
    assert found.tls == trocar.TlsOptions("/ca.pem")
    monkeypatch.setenv("TROCAR_SERVER", "env")
    monkeypatch.setenv("TROCAR_TOKEN", "theirs")
    monkeypatch.setenv("TROCAR_CA", "/other.pem")
    found = connect_settings()
    assert (found.target, found.token) == ("env:50051", "theirs")
    assert found.tls == trocar.TlsOptions("/other.pem")
    found = connect_settings("https://given", "own", True)
    assert (found.target, found.token, found.tls) == ("given:50051", "own", True)


def test_certificates_are_merged_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    own = trocar.TlsOptions(certificate="/own.pem", key="/own.key")
    assert connect_settings(tls=own).tls == own
    write_profiles(Profiles("lab", {"lab": Profile("lab", ca="/ca.pem", cert="/me.pem", key="/me.key")}))
    assert connect_settings(tls=own).tls == trocar.TlsOptions("/ca.pem", "/own.pem", "/own.key")
    assert connect_settings("other", tls=own).tls == own
    given = trocar.TlsOptions("/given.pem")
    assert connect_settings(tls=given).tls == trocar.TlsOptions("/given.pem", "/me.pem", "/me.key")
    monkeypatch.setenv("TROCAR_CA", "/env.pem")
    assert connect_settings().tls == trocar.TlsOptions("/env.pem", "/me.pem", "/me.key")
    assert connect_settings(tls=own).tls == trocar.TlsOptions("/env.pem", "/own.pem", "/own.key")
    assert connect_settings("other").tls == trocar.TlsOptions("/env.pem")
    half = trocar.TlsOptions(certificate="/own.pem")  # no other certificate's key
    assert connect_settings(tls=half).tls == trocar.TlsOptions("/env.pem", "/own.pem")
    assert (connect_settings(tls=True).tls, connect_settings(tls=False).tls) == (True, False)


def test_a_profiles_token_goes_to_its_own_server_only(monkeypatch: pytest.MonkeyPatch) -> None:
    write_profiles(Profiles("lab", {"lab": LAB, "home": Profile("home")}))
    assert connect_settings("other").token is None
    assert connect_settings("other").tls is None
    assert connect_settings("lab").token == "secret"
    monkeypatch.setenv("TROCAR_SERVER", "other")
    assert connect_settings(profile="lab").token is None
    monkeypatch.delenv("TROCAR_SERVER")
    monkeypatch.setenv("TROCAR_PROFILE", "home")
    assert (connect_settings().target, connect_settings().token) == ("home:50051", None)


def test_plain_text_beside_tls_is_refused() -> None:
    with pytest.raises(ValueError, match="http:// says plain text, and the other settings the opposite"):
        connect_settings("http://gpu1", tls=True)
    assert connect_settings("https://gpu1").tls is True


def test_the_file_is_for_its_owner_only_and_comes_back_equal() -> None:
    odd = Profile('un"ix\\:é', "tok en", tls=True)
    written = Profiles("a b", {"a b": odd, "lab": LAB})
    path = write_profiles(written)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_profiles() == written
    assert list(path.parent.iterdir()) == [path]
    assert "secret" not in repr(LAB)
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"may be read by others; run: chmod 600"):
        read_profiles()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("current = 'lba'\n[profiles.lab]\nserver='x'", "did you mean lab"),
        ("[profiles.lab]\nsrver='x'", "no setting 'srver'; did you mean server"),
        ("[profiles.lab]\ntls='yes'", "profiles.lab.tls is yes, not true or false"),
        ("server='x'", "no setting 'server'; the file has `current`"),
        ("[[", "config.toml: "),
    ],
)
def test_a_file_with_mistakes_says_which(text: str, message: str) -> None:
    path = write_profiles(Profiles())
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        connect_settings()
    assert connect_settings("given").target == "given:50051"


def test_an_unknown_profile_names_the_nearest() -> None:
    write_profiles(Profiles("lab", {"lab": LAB}))
    with pytest.raises(ValueError, match=r"no profile 'lub' in .*did you mean lab"):
        trocar.connect(profile="lub")
    assert profiles_file().name == "config.toml"


@pytest.mark.parametrize(
    ("text", "is_tls", "cure"),
    [
        ("OPENSSL_internal:WRONG_VERSION_NUMBER", True, "leave out tls="),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", True, "renew it"),
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", True, "--ca ca.pem"),
        ("Hostname Verification Check failed.", True, "subjectAltName"),
        ("TLSV1_ALERT_CERTIFICATE_REQUIRED", True, "--cert me.pem --key me.key"),
        ("failed to connect to all addresses; last error: Socket closed", False, "connect with tls=True"),
        ("failed to connect to all addresses; last error: Socket closed", True, "client certificates"),
        ("Socket closed", False, ""),
        ("Connection refused", True, ""),
    ],
)
def test_each_tls_mistake_has_its_cure(text: str, is_tls: bool, cure: str) -> None:
    found = tls_advice(text, is_tls=is_tls)
    assert cure in found
    assert bool(found) == bool(cure)


def test_a_key_without_its_certificate_is_refused_before_grpc_ends_the_process(tmp_path: Path) -> None:
    key = tmp_path / "me.key"
    key.write_text("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match="has a key and no certificate; give both"):
        trocar.connect("localhost", tls=trocar.TlsOptions(key=key))
    with pytest.raises(ValueError, match=r"ca of TlsOptions: .*should hold a certificate.* is a private key"):
        trocar.connect("localhost", tls=trocar.TlsOptions(ca=key))
