"""What the supervisors of a cluster decide without Ray."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trocar_server.cluster.replica_server import own_config
from trocar_server.config import ClusterConfig, ModelConfig, PlacementConfig, ServerConfig, read_config
from trocar_server.errors import ServiceError

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def report(node_id: str, bound: str, node_address: str = "10.0.0.1") -> dict[str, str]:
    return {"node_id": node_id, "node_address": node_address, "bound": bound}


def test_a_gateway_gets_the_port_of_the_dead_one_on_its_node() -> None:
    """Clients know the port; the report of a gateway that was killed stays for some seconds."""
    from trocar_server.cluster.deployments import taken_addresses

    assert taken_addresses([report("a", "0.0.0.0:50051")], "10.0.0.1", "a") == []


def test_simulated_nodes_of_one_machine_do_not_share_a_port() -> None:
    from trocar_server.cluster.deployments import taken_addresses

    reports = [report("b", "127.0.0.1:50051"), report("c", "127.0.0.1:50051", "10.0.0.2")]
    assert taken_addresses(reports, "10.0.0.1", "a") == ["127.0.0.1:50051"]


def test_a_directory_that_was_just_started_says_so(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways would take replicas that have not reported yet for lost, and close their connections."""
    from trocar_server.cluster import directory

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    known = directory.Directory(str(tmp_path_factory.mktemp("data")))
    assert known.state()["is_new"]
    now[0] += 2.0
    assert not known.state()["is_new"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "Traceback ...\ntrocar_server.cluster.child_process.ChildFailedError: no such file 'x'\n",
            "no such file 'x'",
        ),
        (
            "Traceback ...\ntrocar_server.errors.ServiceError: the key of the cluster cannot be read\nmore",
            "the key of the cluster cannot be read",
        ),
        ("something\nelse", "else"),
        ("", "see the logs of Ray"),
    ],
)
def test_our_own_words_are_found_in_a_traceback(message: str, expected: str) -> None:
    from trocar_server.cluster.deploying import cause_of

    assert cause_of(message) == expected


def test_a_replica_takes_no_port_from_the_environment_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several replicas run on a node, and the image of the server sets ports and a page for one."""
    from trocar_server.cluster.deployments import child_config
    from trocar_server.cluster.ranks.rank_placement import at_address

    given = ServerConfig(models={"a": ModelConfig(architecture="resnet18")})
    monkeypatch.setenv("TROCAR_HOST", "0.0.0.0")
    monkeypatch.setenv("TROCAR_PORT", "50051")
    monkeypatch.setenv("TROCAR_HEALTH_PORT", "50052")
    monkeypatch.setenv("TROCAR_METRICS_PORT", "9464")
    monkeypatch.setenv("TROCAR_PAGE__ENABLED", "true")
    monkeypatch.setenv("TROCAR_MODELS__b__ARCHITECTURE", "vgg11")
    for config in (given, ServerConfig(models=given.models, health_port=1, metrics_port=2)):
        settings = at_address("10.0.0.1", child_config(config, "a", PlacementConfig()))
        found = own_config({"config": settings, "model_id": "a"})
        assert (found.host, found.port, found.health_port) == ("10.0.0.1", 0, None)
        assert not found.page.enabled
        assert found.metrics_port == (None if config is given else 0)
        assert list(found.models) == ["a"]


def test_a_gateway_learns_how_long_it_may_wait_for_calls() -> None:
    from trocar_server.cluster.deployments import gateway_config

    settings = gateway_config(ServerConfig(grace_s=40.0, cluster=ClusterConfig(drain_s=7.0)))
    found = ServerConfig(**settings)
    assert (found.cluster.drain_s, found.grace_s) == (7.0, 40.0)


def test_a_deployment_means_the_same_folders_and_files_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trocar cluster scale` runs in another one, and with other folders all replicas would be replaced."""
    from trocar_server.cluster import deploying
    from trocar_server.cluster.deployments import model_target

    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    for folder in (there, elsewhere):
        folder.mkdir()
    (there / "cluster.toml").write_text(
        """
        [server]
        data_dir = "data"
        cache_dir = "cache"
        tls_cert = "cert.pem"
        tls_key = "key.pem"
        [models.cats]
        architecture = "resnet18"
        weights = "cats.safetensors"
        [datasets.photos]
        path = "photos"
        [cluster]
        trainers_dir = "trainers"
        """
    )
    applied: list[Any] = []
    specs: list[dict[str, Any]] = []
    monkeypatch.setattr(deploying, "_run", applied.extend)
    serve = SimpleNamespace(start=lambda **_: None, status=lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(deploying, "serve", serve)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])
    monkeypatch.setattr(
        deploying, "prepare", lambda config, host: specs.append(deploying._spec(config, host))
    )
    monkeypatch.chdir(there)
    deploying.deploy(read_config(Path("cluster.toml")))
    monkeypatch.chdir(elsewhere)
    config = ServerConfig(**specs[0]["config"])
    found = model_target("cats", config, PlacementConfig())
    for target in (applied[0], found):
        settings = arguments_of(target)[1]
        assert settings["data_dir"] == str(there / "data")
        assert settings["cache_dir"] == str(there / "cache")
        assert settings["cluster"]["trainers_dir"] == str(there / "trainers")
        assert settings["models"]["cats"]["weights"] == str(there / "cats.safetensors")
        assert settings["datasets"]["photos"]["path"] == str(there / "photos")
        assert settings["tls_key"] == str(there / "key.pem")
    assert version_of(found) == version_of(applied[0])


def test_relative_files_of_the_command_line_are_those_beside_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas run in folders of Ray, where the same relative path is no file or another one."""
    from trocar_server.cluster.deploying import with_absolute_paths
    from trocar_server.cluster.deployments import child_config, gateway_config

    monkeypatch.chdir(tmp_path)
    models = {
        "files": {"weights": "m.safetensors", "categories": "names.txt", "processor": "bert"},
        "folder": {"source": "hf:./bert"},
        "names": {
            "weights": "random:0",
            "categories": "torchvision:resnet50",
            "source": "hf:org/name@c0ffee",
        },
    }
    config = with_absolute_paths(
        read_config(
            tls_cert=Path("c.pem"),
            tls_key="k.pem",
            tls_client_ca="ca.pem",
            page={"tls_cert": "page.pem"},
            models=models,
            datasets={"photos": {"path": "photos"}},
            cache_dir="cache",
        )
    )
    files, folder, names = (child_config(config, name, PlacementConfig()) for name in models)
    for name, file in (("tls_cert", "c.pem"), ("tls_key", "k.pem"), ("tls_client_ca", "ca.pem")):
        assert files[name] == gateway_config(config)[name] == str(tmp_path / file)
    assert config.page.tls_cert == tmp_path / "page.pem"
    assert files["cache_dir"] == str(tmp_path / "cache")
    assert files["datasets"]["photos"]["path"] == str(tmp_path / "photos")
    assert files["models"]["files"] == {
        "weights": str(tmp_path / "m.safetensors"),
        "categories": str(tmp_path / "names.txt"),
        "processor": str(tmp_path / "bert"),
    }
    assert folder["models"]["folder"] == {"source": f"hf:{tmp_path / 'bert'}"}
    assert names["models"]["names"] == models["names"]


def test_a_deployment_keeps_what_was_set_and_what_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left open, a replica reads from the environment of its node."""
    from trocar_server.cluster.deploying import with_absolute_paths

    monkeypatch.setenv("TROCAR_TLS_CERT", "c.pem")
    monkeypatch.setenv("TROCAR_MODELS__m__WEIGHTS", "m.safetensors")
    monkeypatch.chdir(tmp_path)
    config = read_config(grace_s=3.0, health_port=None, cluster={"drain_s": 7.0})
    found = with_absolute_paths(config)
    assert found.model_fields_set == config.model_fields_set | {"data_dir", "cache_dir"}
    assert found.cluster.model_fields_set == {"drain_s"}
    assert found.models["m"].model_fields_set == {"weights"}
    assert (found.tls_cert, found.models["m"].weights) == (
        tmp_path / "c.pem",
        str(tmp_path / "m.safetensors"),
    )


def test_a_deployment_is_read_without_the_variables_of_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from trocar_server.cluster import deploying

    monkeypatch.setenv("TROCAR_GRACE_S", "7")
    config = ServerConfig(models={"resnet18": ModelConfig()})
    stored = {"config": config.model_dump(mode="json", exclude_unset=True)}
    directory = SimpleNamespace(spec=SimpleNamespace(remote=lambda: stored))
    monkeypatch.setattr(deploying, "open_directory", lambda: directory)
    monkeypatch.setattr(ray, "get", lambda reference: reference)
    monkeypatch.setenv("TROCAR_GRACE_S", "8")
    monkeypatch.setenv("TROCAR_THREADS", "2")
    monkeypatch.setenv("TROCAR_LIMITS__MAX_BATCH", "3")
    assert deploying.deployed() == config


def test_a_deployment_without_folders_keeps_those_of_whoever_deployed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trocar cluster scale` by another user would replace all replicas, and the new ones could not start."""
    from trocar_server.cluster.deploying import with_absolute_paths
    from trocar_server.cluster.deployments import child_config, gateway_config

    config = with_absolute_paths(ServerConfig(models={"m": ModelConfig(architecture="resnet18")}))
    replica, gateway = child_config(config, "m", PlacementConfig()), gateway_config(config)
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    stored = ServerConfig(**config.model_dump(mode="json", exclude_unset=True))
    assert child_config(stored, "m", PlacementConfig()) == replica
    assert gateway_config(stored) == gateway


@pytest.mark.parametrize("cache_dir", [None, "weights"])
@pytest.mark.parametrize("data_dir", [None, "state"])
def test_a_replica_finds_the_weights_that_were_downloaded_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_dir: str | None, cache_dir: str | None
) -> None:
    """A replica is told the data directory, and downloads go there only where its operator chose one."""
    from trocar_server.cluster.deploying import with_absolute_paths
    from trocar_server.cluster.deployments import child_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = {"data_dir": data_dir, "cache_dir": cache_dir}
    folders: dict[str, Any] = {name: tmp_path / value for name, value in given.items() if value}
    config = ServerConfig(models={"m": ModelConfig(architecture="resnet18")}, **folders)
    expected = tmp_path / (cache_dir or data_dir or "cache/trocar")
    found = ServerConfig(**child_config(with_absolute_paths(config), "m", PlacementConfig()))
    assert found.weights_dir == config.weights_dir == expected


def arguments_of(target: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = target.target._bound_deployment.init_args
    return found


def version_of(target: Any) -> str:
    return str(target.target._bound_deployment.version)


@pytest.mark.parametrize(
    "changed",
    [
        {"grace_s": 40.0},
        {"cluster": ClusterConfig(drain_s=7.0)},
        {"threads": 2},
    ],
)
def test_replicas_are_replaced_when_what_they_are_given_changes(changed: dict[str, Any]) -> None:
    from trocar_server.cluster.deployments import model_target

    config = ServerConfig(models={"a": ModelConfig(architecture="resnet18")}, data_dir=Path("/data"))
    placement = PlacementConfig()
    version = version_of(model_target("a", config, placement))
    more = placement.model_copy(update={"min_replicas": 2, "max_replicas": 3})
    assert version_of(model_target("a", config, more)) == version
    longer = config.model_copy(update={"cluster": ClusterConfig(start_timeout_s=7.0)})
    assert version_of(model_target("a", longer, placement)) == version  # for those that start just now
    assert version_of(model_target("a", config.model_copy(update=changed), placement)) != version


def test_applications_are_made_before_the_nodes_of_the_models_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Serve makes those of a configuration file once; a command can still be told what is wrong."""
    from trocar_server.cluster import application, deploying

    path = tmp_path / "cluster.toml"
    path.write_text("[server]\ninsecure = true\n[models.resnet50]\n[cluster.models.resnet50]\ncpus = 2\n")
    head = {"Alive": True, "Resources": {"node:__internal_head__": 1.0, "memory": 4e9}}
    monkeypatch.setattr(ray, "nodes", lambda: [head])
    prepared: list[ServerConfig] = []
    monkeypatch.setattr(application, "prepare", prepared.append)
    assert application.model({"config": str(path), "model_id": "resnet50"})
    assert application.gateway({"config": str(path)})
    assert len(prepared) == 2
    with pytest.raises(ServiceError, match="no node can run a replica of 'resnet50'"):
        deploying.deploy(read_config(path))


@pytest.mark.parametrize(("most", "expected"), [(None, 2), (0, 0), (5, 5)])
def test_the_most_replicas_are_those_that_were_named(
    monkeypatch: pytest.MonkeyPatch, most: int | None, expected: int
) -> None:
    from trocar_server.cluster import commands, deploying

    scaled: list[tuple[str, int, int]] = []
    monkeypatch.setattr(commands, "_on_cluster", lambda address: nullcontext())
    monkeypatch.setattr(deploying, "scale", lambda *given: scaled.append(given))
    monkeypatch.setattr(deploying, "deployed", lambda: None)
    monkeypatch.setattr(deploying, "wait_until_ready", lambda config: None)
    commands.scale("m", 2, most)
    assert scaled == [("m", 2, expected)]
