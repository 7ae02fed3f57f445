"""A configuration that is read again: what changes, what does not, and that an error changes nothing."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity, TellsPaths
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from trocar_api.reasons import ErrorReason
from trocar_server.app import reloading
from trocar_server.app.specs import dataset_folders
from trocar_server.auth import Scope, TokenFile
from trocar_server.config import ServerConfig
from trocar_server.engine.host.deployment import Deployment
from trocar_server.errors import ServiceError
from trocar_server.models import ModelSpec
from trocar_server.training.datasets import ListedFolder

ROW = np.zeros((1, 3), np.float32)
Change = Callable[..., None]
Found = TypeVar("Found")


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    return serve(models={"a": custom(Identity), "gated": custom(Gated)}, data_dir=tmp_path)


@pytest.fixture
def client(running: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(running.address, retries=0) as connected:
        yield connected


@pytest.fixture
def change(running: RunningServer) -> Change:
    """Lets the next reload read other settings."""

    def change(**settings: Any) -> None:
        lifecycle = running.app.lifecycle
        plain = lifecycle.config.model_dump(exclude_unset=True)
        lifecycle.reread = lambda: ServerConfig(**{**plain, **settings})

    return change


async def at_once(read: Callable[[], Found]) -> Found:
    """Read on the event loop that changes what is read."""
    return read()


def ids(client: trocar.Client) -> list[str]:
    return [model.model_id for model in client.models()]


def test_nothing_changes_where_nothing_has(client: trocar.Client, change: Change) -> None:
    change()
    assert client.reload_config() == []


def test_a_server_without_a_configuration_says_so(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.InvalidArgumentError, match="no configuration file to reload"):
        client.reload_config()


def test_models_come_and_go(client: trocar.Client, change: Change) -> None:
    change(models={"gated": custom(Gated), "b": custom(Identity)})
    assert client.reload_config() == ["model a: removed", "model b: added"]
    assert ids(client) == ["b", "gated"]
    assert np.array_equal(client.extract("b", ROW, "identity")["identity"], ROW)
    with pytest.raises(trocar.errors.UnknownModelError):
        client.extract("a", ROW, "identity")


def test_replies_of_a_reloaded_model_are_cached_and_those_of_the_old_one_dropped(
    serve: Serve, tmp_path: Path
) -> None:
    a = custom(Identity)
    running = serve(models={"a": a}, data_dir=tmp_path, limits={"feature_cache_bytes": 1 << 20})
    replies = running.engine.replies
    lifecycle = running.app.lifecycle
    plain = lifecycle.config.model_dump(exclude_unset=True)
    lifecycle.reread = lambda: ServerConfig(**{**plain, "models": {"a": {**a, "replicas": 2}}})
    with trocar.connect(running.address, options=trocar.options(cache=True), retries=0) as client:
        client.extract("a", ROW, "identity")
        assert running.run(lambda: at_once(lambda: len(replies))) == 1
        assert client.reload_config() == ["model a: changed"]
        assert running.run(lambda: at_once(lambda: len(replies))) == 0
        assert not client.extract("a", ROW, "identity").is_cached
        assert client.extract("a", ROW, "identity").is_cached


def test_a_reloaded_model_is_within_the_limits_of_a_pass(
    running: RunningServer, client: trocar.Client, change: Change
) -> None:
    change(models={"a": {**custom(Identity), "replicas": 2}, "gated": custom(Gated)})
    assert client.reload_config() == ["model a: changed"]
    deployment = running.engine.deployment("a")
    assert deployment.max_pass_bytes == running.engine.limits.max_pass_bytes


def test_a_running_call_ends_on_the_model_that_it_began_with(
    running: RunningServer, client: trocar.Client, change: Change, gate: Gate
) -> None:
    before = client.extract("gated", ROW, "last")["last"]
    gate.hold()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.extract("gated", ROW, "last")["last"]))
    thread.start()
    assert gate.entered.wait(WAIT_S)
    asked = threading.Event()
    read = running.app.lifecycle
    change(models={"a": custom(Identity), "gated": custom(Gated, weights="random:7")})
    reread = read.reread

    def told() -> ServerConfig:
        asked.set()
        assert reread is not None
        return reread()

    read.reread = told
    answers: list[Any] = []
    reloading = threading.Thread(target=lambda: answers.append(client.reload_config()))
    reloading.start()
    assert asked.wait(WAIT_S)  # the new model waits for the thread that the old one holds
    gate.release()
    thread.join(WAIT_S)
    reloading.join(WAIT_S)
    assert answers == [["model gated: changed"]]
    assert np.array_equal(found[0], before)
    after = client.extract("gated", ROW, "last")["last"]
    assert not np.array_equal(after, before)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"models": {"a": {"architecture": "resnet9000"}}}, trocar.errors.UnknownArchitectureError),
        ({"models": {"a": custom(TellsPaths, (7,))}}, trocar.errors.ModelInvalidError),
        ({"port": 1}, trocar.errors.InvalidArgumentError),
        ({"limits": {"max_chunk_bytes": 4096}}, trocar.errors.InvalidArgumentError),
        ({"datasets": {"d": {"path": "/there/is/none"}}}, trocar.TrocarError),
    ],
)
def test_what_is_wrong_leaves_everything_as_it_was(
    running: RunningServer,
    client: trocar.Client,
    change: Change,
    settings: dict[str, Any],
    expected: type[Exception],
) -> None:
    before, limits = running.app.lifecycle.config, client.server_info().limits
    change(**{"models": {"new": custom(Identity)}, **settings})
    with pytest.raises(expected):
        client.reload_config()
    assert ids(client) == ["a", "gated"]
    assert running.app.lifecycle.config is before
    assert client.server_info().limits == limits
    assert np.array_equal(client.extract("a", ROW, "identity")["identity"], ROW)


def test_a_model_that_a_client_has_loaded_is_not_overwritten(client: trocar.Client, change: Change) -> None:
    client.load("squeezenet1_1", "random:0")
    change(models={"a": custom(Identity), "gated": custom(Gated), "squeezenet1_1": custom(Identity)})
    with pytest.raises(trocar.errors.ModelConflictError, match="squeezenet1_1"):
        client.reload_config()


def test_limits_hold_from_the_next_call(client: trocar.Client, change: Change) -> None:
    before = client.server_info().limits
    change(limits={"max_batch": 2})
    assert client.reload_config() == ["limits.max_batch: 4096 -> 2"]
    assert client.server_info().limits == replace(before, max_batch=2)
    with pytest.raises(trocar.errors.RequestTooLargeError):
        client.extract("a", np.zeros((3, 3), np.float32), "identity")


def test_a_lower_limit_of_replies_holds_for_requests_that_were_known(
    running: RunningServer, client: trocar.Client, change: Change
) -> None:
    rows = np.zeros((1000, 3), np.float32)
    assert client.extract("a", rows, "identity")["identity"].nbytes == 12_000
    change(limits={"max_reply_bytes": 1024})
    client.reload_config()
    with pytest.raises(trocar.errors.ReplyTooLargeError, match="Nothing was computed"):
        client.plan("a", rows.shape, taps="identity")
    with pytest.raises(trocar.errors.ReplyTooLargeError, match="Nothing was computed"):
        client.extract("a", rows, "identity")


def test_data_sets_come_and_go(client: trocar.Client, change: Change, tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "pets" / name / "1.png")
    change(datasets={"pets": {"path": str(tmp_path / "pets")}})
    assert client.reload_config() == ["data set pets: added"]
    assert [dataset.dataset_id for dataset in client.datasets()] == ["pets"]
    change(datasets={})
    assert client.reload_config() == ["data set pets: removed"]
    assert client.datasets() == []


def test_data_sets_are_listed_on_another_thread_than_the_event_loops(
    running: RunningServer, client: trocar.Client, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system that takes seconds, in which no call would be answered."""
    threads: list[int] = []

    def listed(config: ServerConfig) -> dict[str, ListedFolder]:
        threads.append(threading.get_ident())
        return dataset_folders(config)

    monkeypatch.setattr(reloading, "dataset_folders", listed)
    change()
    client.reload_config()
    assert len(threads) == 1
    assert running.run(lambda: at_once(threading.get_ident)) not in threads


def test_tokens_are_asked_for_from_the_next_call(
    running: RunningServer, client: trocar.Client, change: Change, tmp_path: Path
) -> None:
    _, token = TokenFile(tmp_path).add("alice", [Scope.ADMIN], expires_at_s=None, now_s=0)
    change(tokens=True)
    assert client.reload_config() == ["tokens: required"]
    with pytest.raises(trocar.errors.TokenMissingError):
        client.models()
    with trocar.connect(running.address, token=token) as known:
        assert ids(known) == ["a", "gated"]
        change(tokens=False)
        known.reload_config()
    assert ids(client) == ["a", "gated"]


def test_a_cancelled_reload_is_applied_and_does_not_stand_in_the_way_of_the_next_one(
    running: RunningServer,
    client: trocar.Client,
    change: Change,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is cancelled is the long retry of a model that failed before."""
    _, token = TokenFile(tmp_path).add("alice", [Scope.ADMIN], expires_at_s=None, now_s=0)
    client.unload("a")
    failed = ServiceError(ErrorReason.WEIGHTS_UNAVAILABLE, "no weights yet")
    running.run(lambda: at_once(lambda: running.engine.catalogue.get("a").fail(failed)))
    build = running.engine.deployments.build
    cancelled = threading.Event()

    async def slowly(spec: ModelSpec, replicas: int) -> Deployment:
        if spec.model_id == "a":
            try:
                await asyncio.sleep(WAIT_S)
            finally:
                cancelled.set()
        return await build(spec, replicas)

    monkeypatch.setattr(running.engine.deployments, "build", slowly)
    models = {"a": custom(Identity), "gated": custom(Gated), "b": custom(Identity)}
    change(models=models, tokens=True, limits={"max_batch": 2})
    with pytest.raises(
        (trocar.errors.DeadlineExceededError, trocar.errors.TokenMissingError)
    ):  # which one comes first
        client.reload_config(timeout_s=1)
    assert cancelled.wait(WAIT_S)
    monkeypatch.undo()
    with pytest.raises(trocar.errors.TokenMissingError):
        client.models()
    with trocar.connect(running.address, token=token) as known:
        assert known.server_info().limits.max_batch == 2
        change(models=models, tokens=True, limits={"max_batch": 3})
        assert known.reload_config() == ["limits.max_batch: 2 -> 3", "model a: loaded"]


@contextmanager
def loading(running: RunningServer, client: trocar.Client) -> Iterator[Future[Any]]:
    """Begin to load model `a`, which ends after the context."""
    client.unload("a")
    deployments = running.engine.deployments
    began, may_end = threading.Event(), threading.Event()
    prepare = deployments._on_build

    def slowly(deployment: Deployment) -> Awaitable[None]:
        deployments._on_build = prepare  # only this one
        began.set()
        return asyncio.ensure_future(asyncio.to_thread(may_end.wait, WAIT_S))  # type: ignore[arg-type]

    deployments._on_build = slowly
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(client.load, "a")
        assert began.wait(WAIT_S)
        try:
            yield load
        finally:
            may_end.set()


def test_a_load_that_ends_after_a_reload_leaves_its_model_in_place(
    running: RunningServer, client: trocar.Client, change: Change
) -> None:
    with loading(running, client):
        change(models={"a": custom(TellsPaths), "gated": custom(Gated)})
        assert client.reload_config() == ["model a: changed"]
        new = running.run(lambda: at_once(lambda: running.engine.deployments["a"]))
    found = running.run(lambda: at_once(lambda: running.engine.deployments.find("a")))
    assert found is new
    assert found.hosted is running.engine.catalogue.get("a").hosted


def test_a_model_that_a_reload_removes_while_it_is_loaded_is_gone(
    running: RunningServer, client: trocar.Client, change: Change
) -> None:
    with loading(running, client) as load:
        change(models={"gated": custom(Gated)})
        client.reload_config()
    assert isinstance(load.exception(), trocar.errors.UnknownModelError)
    assert "a" not in running.engine.deployments
