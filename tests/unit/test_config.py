"""Configuration: defaults, a file, the environment, the command line, and what is wrong with them."""

from pathlib import Path
from typing import Any

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.config import ServerConfig, read_config
from trocar_server.errors import ServiceError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TROCAR_HOST", "TROCAR_PORT", "TROCAR_DEVICE", "TROCAR_THREADS"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text)
    return path


def refused(path: Path | None = None, **overrides: object) -> str:
    with pytest.raises(ServiceError) as caught:
        read_config(path, **overrides)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    return caught.value.message


def test_the_defaults_are_safe() -> None:
    config = read_config()
    assert (config.host, config.port, config.reflection) == ("127.0.0.1", 50051, False)


SHARES = {"max_pass_bytes", "max_pending_bytes", "max_principal_bytes"}
"""Their 0 becomes a share of the device's or the host's memory when the engine starts."""
OFF = {"feature_cache_bytes"}
"""Their 0 means that there is none."""


@pytest.mark.parametrize("name", sorted(set(type(ServerConfig().limits).model_fields) - SHARES - OFF))
def test_every_limit_is_finite_by_default(name: str) -> None:
    assert 0 < getattr(read_config().limits, name) < 1 << 40


@pytest.mark.parametrize("name", sorted(OFF))
def test_what_is_off_by_default_is_zero(name: str) -> None:
    assert getattr(read_config().limits, name) == 0


def test_a_file_sets_what_it_names(tmp_path: Path) -> None:
    text = '[server]\nport = 1234\n[limits]\nmax_batch = 7\n[models.resnet50]\nweights = "random:3"\n'
    config = read_config(written(tmp_path, text))
    assert (config.port, config.host, config.limits.max_batch) == (1234, "127.0.0.1", 7)
    assert config.models["resnet50"].weights == "random:3"


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROCAR_PORT", "4321")
    monkeypatch.setenv("TROCAR_LIMITS__MAX_BATCH", "9")
    config = read_config(written(tmp_path, "[server]\nport = 1234\n[limits]\nmax_batch = 7\nmax_taps = 3\n"))
    assert (config.port, config.limits.max_batch, config.limits.max_taps) == (4321, 9, 3)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, "[server]\nport = 1234\n"), port=99).port == 99


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROCAR_HOST", "127.0.0.9")
    assert read_config(host="127.0.0.2").host == "127.0.0.2"


def test_files_of_a_model_are_looked_up_beside_the_config_file(tmp_path: Path) -> None:
    text = '[models.m]\nfactory = "a:b"\nweights = "w/m.safetensors"\ncategories = "names.txt"\n'
    model = read_config(written(tmp_path, text)).models["m"]
    assert (model.weights, model.categories) == (
        str(tmp_path / "w/m.safetensors"),
        str(tmp_path / "names.txt"),
    )


def test_files_of_tls_are_looked_up_beside_the_config_file(tmp_path: Path) -> None:
    text = '[server]\ntls_cert = "a.pem"\ntls_key = "/etc/key.pem"\n'
    config = read_config(written(tmp_path, text))
    assert (config.tls_cert, config.tls_key, config.tls_client_ca) == (
        tmp_path / "a.pem",
        Path("/etc/key.pem"),
        None,
    )
    assert not config.tokens


@pytest.mark.parametrize("weights", ["DEFAULT", "IMAGENET1K_V2", "random:0"])
def test_weights_that_are_no_file_stay_as_they_are(tmp_path: Path, weights: str) -> None:
    text = f'[models.m]\nweights = "{weights}"\n'
    assert read_config(written(tmp_path, text)).models["m"].weights == weights


def test_an_absolute_file_stays_where_it_is(tmp_path: Path) -> None:
    text = '[models.m]\nweights = "/data/m.safetensors"\n'
    assert read_config(written(tmp_path, text)).models["m"].weights == "/data/m.safetensors"


def test_a_file_in_the_home_directory_is_looked_up_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/operator")
    text = '[models.m]\nweights = "~/m.safetensors"\n'
    weights = read_config(written(tmp_path, text)).models["m"].weights
    assert Path(weights).expanduser() == Path("/home/operator/m.safetensors")


def test_every_wrong_key_is_named_at_once(tmp_path: Path) -> None:
    text = (
        '[server]\nport = "many"\nprot = 1\n[limits]\nmax_batch = 0\n[models.m]\nreplicas = 99\nwieghts = 1'
    )
    message = refused(written(tmp_path, text))
    assert all(
        key in message
        for key in ("port", "prot", "limits.max_batch", "models.m.replicas", "models.m.wieghts")
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[page]\nenable = true", "enabled"),
        ("[images]\norientation = true", "orient"),
        ("[datasets.d]\npaths = 'x'", "path"),
        ("[cluster]\ndrains_s = 1", "drain_s"),
        ("[cluster.models.m]\nmin_replica = 2", "min_replicas"),
        ("[models.m.inputs.ids]\noptionl = true", "optional"),
    ],
)
def test_the_nearest_name_of_every_table_is_told(tmp_path: Path, text: str, name: str) -> None:
    message = refused(written(tmp_path, text))
    nearest = message.partition("nearest: ")[2].partition(";")[0]
    assert name in nearest.split(", ")


@pytest.mark.parametrize(
    "overrides",
    [{"port": -1}, {"port": 65536}, {"port": "x"}, {"threads": 0}, {"grace_s": -1}, {"unknown": 1}],
)
def test_a_wrong_value_of_the_command_line_is_named(overrides: dict[str, Any]) -> None:
    assert next(iter(overrides)) in refused(**overrides)


def test_a_missing_file_is_named_without_its_folder(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere.toml")
    assert "nowhere.toml" in message
    assert str(tmp_path) not in message


@pytest.mark.parametrize("text", ["port = ", "[server", "\x00"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    assert "server.toml" in refused(written(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "server.toml" in refused(path)


@pytest.mark.parametrize(
    "text", ["server = 5", "models = 3", '[models]\nresnet50 = "random:0"', "limits = []"]
)
def test_a_value_where_a_table_belongs_is_refused(tmp_path: Path, text: str) -> None:
    refused(written(tmp_path, text))


def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[models.x]\nsizes = { batch = 2 }", "no such setting here; it is one of [models.ID.inputs.NAME]"),
        ("[models.x]\nport = 3", "no such setting here; it is one of [page] and [server]"),
        ("[models.x]\narchitecure = 'r'", "no such setting; nearest: architecture; docs"),
        ("[engine]\nmodels = 'x'", "no such setting here; it is one of [cluster] and [server]"),
        ("[cluster.models.x]\nmin_replica = 1", "no such setting; nearest: min_replicas, max_replicas; docs"),
        ("[models.x.preprocessing]\nmeen = [0.1]", "no such setting; nearest: mean; docs"),
    ],
)
def test_an_unknown_setting_has_neighbours_of_its_own_table(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    with pytest.raises(ServiceError) as caught:
        read_config(file)
    assert words in caught.value.message


def test_a_file_that_is_no_text_says_so(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\x89PNG")
    with pytest.raises(ServiceError, match="it is not a text in UTF-8"):
        read_config(file)
