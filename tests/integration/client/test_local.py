"""`connect("local")`: the same answers from a server in this very process, and nothing left behind."""

import asyncio
import gc
import importlib.metadata
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trocar
from tests.support.files.log_records import log_records
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import hooked_outputs, noise, rebuilt_by_name, same_bits
from tests.support.servers import warm_python
from tests.support.servers.footprint import hook_count
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import custom, rebuilt
from tests.support.servers.waiting import no_thread_left, wait_until
from trocar._transport import local

WAIT_S = 60.0
IMAGES = noise(2, 3, 8, 8)
PLAIN = {"plain": custom(Plain, (3, 8, 8))}
CPU = {"device": "cpu"}
TAPS = ["conv", "relu@1", "fc"]


class HoldsLock(nn.Identity):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def own(module: nn.Module, *shape: int) -> dict[str, Any]:
    return {"net": {"module": module, "input_shape": shape}}


def connect(models: Any) -> trocar.Client:
    return trocar.connect("local", models=models, settings=CPU)


def local_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("trocar-", "torch-"))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets of this test go, so that what is left can be seen."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def nothing_left(folder: Path) -> Iterator[None]:
    """Whatever the test does: no thread and no file of it is left."""
    before = local_threads()
    yield
    wait_until(lambda: local_threads() <= before)
    assert list(folder.iterdir()) == []


# --- The same answers -------------------------------------------------------------------------------------


def test_the_answers_are_those_of_torch_and_of_a_separate_server(client: trocar.Client) -> None:
    expected = hooked_outputs(rebuilt(Plain), [IMAGES], ["conv", "relu", "fc"])
    remote = client.extract("plain", IMAGES, TAPS)
    with connect(PLAIN) as local:
        found = local.extract("plain", IMAGES, TAPS)
    assert list(found) == list(remote)
    for name, key in zip(TAPS, [("conv", 0, ""), ("relu", 1, ""), ("fc", 0, "")], strict=True):
        assert same_bits(found[name], expected[key])
        assert torch.equal(torch.from_numpy(found[name]), torch.from_numpy(remote[name]))


async def test_the_asyncio_client_has_the_same_answers() -> None:
    expected = hooked_outputs(rebuilt(Plain), [IMAGES], ["fc"])["fc", 0, ""]
    async with trocar.aio.connect("local", models=PLAIN, settings=CPU) as local:
        maps = await asyncio.gather(*(local.extract("plain", IMAGES, "fc") for _ in range(8)))
    assert all(same_bits(found["fc"], expected) for found in maps)


def test_names_stand_for_models_of_torchvision() -> None:
    image = noise(1, 3, 64, 64)
    expected = hooked_outputs(rebuilt_by_name("resnet18"), [image], ["layer4"])["layer4", 0, ""]
    with connect(["resnet18=random:0"]) as local:
        assert same_bits(local.extract("resnet18", image, "layer4")["layer4"], expected)


def test_weights_may_be_named_by_model_id() -> None:
    with connect({"resnet18": "random:3"}) as local:
        assert local.model("resnet18").weights == "random:3"


def test_a_client_without_models_may_load_one() -> None:
    with connect(None) as local:
        assert local.models() == []
        assert local.load("resnet18", "random:0").parameter_count == 11_689_512


def test_options_are_those_of_the_configuration_file() -> None:
    # Another number would stay with the process: threads that call torch later get it, too.
    options = {**CPU, "threads": torch.get_num_threads(), "limits": {"max_batch": 2}}
    with trocar.connect("local", models=PLAIN, settings=options) as local:
        assert local.server_info().limits.max_batch == 2
        with pytest.raises(trocar.errors.RequestTooLargeError):
            local.extract("plain", noise(3, 3, 8, 8), "fc")


# --- A module of the caller -------------------------------------------------------------------------------


def test_a_module_is_hosted_with_its_own_weights() -> None:
    net = Plain()
    with connect(own(net, 3, 8, 8)) as local:
        found = local.extract("net", IMAGES, "fc")["fc"]
        assert local.model("net").weights == "factory"
    assert same_bits(found, hooked_outputs(net.eval(), [IMAGES], ["fc"])["fc", 0, ""])


def test_hosting_leaves_the_module_as_it_was() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    parameters, state = list(net.parameters()), {k: v.clone() for k, v in net.state_dict().items()}
    with connect(own(net, 3, 8, 8)) as local:
        local.extract("net", IMAGES, ["*"])
        local.unload("net")
        local.load("net")
        local.extract("net", IMAGES, ["*"])
    assert all(module.training for module in net.modules())
    assert all(a is b and a.requires_grad for a, b in zip(net.parameters(), parameters, strict=True))
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert hook_count(net) == 0


def test_training_the_module_meanwhile_shows_in_the_next_call() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with connect(own(net, 3, 8, 8)) as local:
        before = local.extract("net", IMAGES, "1")["1"]
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.from_numpy(IMAGES)).square().mean().backward()
            optimizer.step()
        after = local.extract("net", IMAGES, "1")["1"]
    assert not same_bits(before, torch.from_numpy(after))
    assert same_bits(after, hooked_outputs(net.eval(), [IMAGES], ["1"])["1", 0, ""])


def test_replies_are_not_cached_where_weights_may_change() -> None:
    net = nn.Sequential(nn.Linear(4, 2))
    options = {**CPU, "limits": {"feature_cache_bytes": 1 << 20}}
    with trocar.connect("local", models=own(net, 4), settings=options) as local:
        assert local.extract("net", noise(1, 4), "0")["0"].any()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert not local.extract("net", noise(1, 4), "0")["0"].any()


def test_gradients_of_the_caller_survive_a_call_between_forward_and_backward() -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    with connect(own(net, 3)) as local:
        loss = net(torch.ones(1, 3)).sum()
        local.extract("net", noise(1, 3), "0")
        loss.backward()
    gradient = net.get_parameter("0.weight").grad
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(2, 3))


def test_a_module_alone_is_enough_where_the_usual_image_fits() -> None:
    with connect({"net": nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())}) as local:
        assert local.model("net").input_shape == (3, 224, 224)


@pytest.mark.usefixtures("nothing_left")
def test_a_module_alone_whose_input_is_another_asks_for_its_shape() -> None:
    with pytest.raises(trocar.errors.ModelInvalidError, match=r'"net": \{"module": \.\.\., "input_shape"'):
        connect({"net": nn.Linear(10, 2)})


# --- What is refused --------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, type[trocar.TrocarError], str]] = {
    "unknown architecture": (["resnet19"], trocar.errors.UnknownArchitectureError, "resnet18"),
    "unknown weights": ({"resnet18": "V9"}, trocar.errors.UnknownWeightsError, "DEFAULT"),
    "no seed": (["resnet18=random:x"], trocar.errors.UnknownWeightsError, "seed"),
    "bad id": ({"UPPER": nn.Identity()}, trocar.errors.ModelInvalidError, "UPPER"),
    "no model": ({"net": 7}, trocar.errors.ModelInvalidError, "int is not a model description"),
    "no module": ({"net": {"module": Plain}}, trocar.errors.ModelInvalidError, "not an nn.Module"),
    "weights for a module": (
        {"net": {"module": Plain(), "weights": "x.safetensors"}},
        trocar.errors.ModelInvalidError,
        "weights cannot go with a module",
    ),
    "unknown key": ({"net": {"factroy": "a:b"}}, trocar.errors.InvalidArgumentError, "factroy"),
    "lazy module": (own(nn.LazyLinear(2), 3), trocar.errors.ModelInvalidError, "net"),
    "lock inside": (own(HoldsLock(), 3), trocar.errors.ModelInvalidError, "cannot be replicated"),
}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_hosted_is_refused_at_connect(case: str) -> None:
    models, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words) as caught:
        connect(models)
    assert type(caught.value) is kind


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("options", [{"port": 1}, {"host": "0.0.0.0"}, {"limits": {"max_batch": 0}}])
def test_an_option_that_is_wrong_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(trocar.errors.InvalidArgumentError, match=next(iter(options))):
        trocar.connect("local", models=[], settings=options)


@pytest.mark.parametrize("extra", [{"models": []}, {"settings": {}}])
def test_models_and_settings_go_with_local_only(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="local"):
        trocar.connect("localhost:1", **extra)


def test_tls_does_not_go_with_local() -> None:
    with pytest.raises(ValueError, match="tls"):
        trocar.connect("local", tls=True)


@pytest.mark.parametrize("missing", ["torch", "trocar_server"])
def test_without_the_server_the_error_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry(importlib.metadata.EntryPoint):
        def load(self) -> Any:
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    found = [Entry("start", "nowhere:start", local.GROUP)] if missing == "torch" else []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    what = "PyTorch" if missing == "torch" else "'trocar_server', a part of the server,"
    with pytest.raises(
        ImportError, match=rf"{what} is not installed: pip install \"trocar\[server\]\""
    ) as caught:
        trocar.connect("local")
    assert isinstance(caught.value, trocar.TrocarError)


def test_without_torch_the_error_is_about_torch_whatever_is_missing_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Entry(importlib.metadata.EntryPoint):
        def load(self) -> Any:
            raise ModuleNotFoundError("No module named 'structlog'", name="structlog")

    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [Entry("start", "nowhere:start", local.GROUP)]
    )
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="PyTorch is not installed"):
        trocar.connect("local")


# --- Coming and going -------------------------------------------------------------------------------------


def test_only_this_user_can_reach_the_socket(folder: Path) -> None:
    with connect(PLAIN):
        (place,) = folder.iterdir()
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.usefixtures("nothing_left")
def test_settings_for_strangers_do_not_lock_the_program_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TOKENS", "true"), ("TLS_CERT", "nowhere.pem"), ("TLS_CLIENT_CA", "nowhere.pem")):
        monkeypatch.setenv(f"TROCAR_{name}", value)
    with trocar.connect("local") as client:
        assert client.models() == []


def test_a_closed_client_leaves_nothing() -> None:
    local = connect(PLAIN)
    local.extract("plain", IMAGES, "fc")
    local.close()
    assert not local_threads() & {"trocar-local"}
    local.close()


@pytest.mark.usefixtures("nothing_left")
async def test_a_closed_asyncio_client_leaves_nothing() -> None:
    local = trocar.aio.connect("local", models=PLAIN, settings=CPU)
    await local.extract("plain", IMAGES, "fc")
    await local.close()
    await local.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_client_that_is_dropped_leaves_nothing() -> None:
    before = set(threading.enumerate())
    local = connect(PLAIN)
    (thread,) = (t for t in set(threading.enumerate()) - before if t.name == "trocar-local")
    del local
    gc.collect()
    thread.join(WAIT_S)


@pytest.mark.usefixtures("nothing_left")
def test_two_at_once_do_not_know_each_other() -> None:
    with connect(PLAIN) as one, connect(own(nn.Sequential(nn.ReLU()), 3)) as other:
        assert [model.model_id for model in one.models()] == ["plain"]
        assert [model.model_id for model in other.models()] == ["net"]
        one.close()
        assert other.extract("net", noise(1, 3), "0")["0"].shape == (1, 3)


@pytest.mark.usefixtures("nothing_left")
async def test_both_kinds_of_client_work_side_by_side() -> None:
    """Two event loops and the sync client's threads share what gRPC has for the process."""
    expected = hooked_outputs(rebuilt(Plain), [IMAGES], ["fc"])["fc", 0, ""]
    with log_records() as records, connect(PLAIN) as sync, ThreadPoolExecutor(4) as pool:
        async with trocar.aio.connect("local", models=PLAIN, settings=CPU) as local:
            blocking = [pool.submit(sync.extract, "plain", IMAGES, "fc") for _ in range(40)]
            found = await asyncio.gather(*(local.extract("plain", IMAGES, "fc") for _ in range(40)))
            found += await asyncio.gather(*map(asyncio.wrap_future, blocking))
    assert all(same_bits(maps["fc"], expected) for maps in found)
    assert records == []


def test_twenty_in_a_row_leave_no_thread_and_no_file() -> None:
    def once() -> None:
        with connect(PLAIN) as local:
            local.extract("plain", IMAGES, "fc")

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    once()
    threads, files = threading.active_count(), open_files()
    for _ in range(20):
        once()
    # The process may start one of its own meanwhile, as a pool grows; a leak would be of twenty.
    wait_until(lambda: threading.active_count() < threads + 5)
    wait_until(lambda: open_files() < files + 5)


def test_ctrl_c_while_it_loads_ends_the_server(folder: Path) -> None:
    entered, released = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __deepcopy__(self, memo: Any) -> "Slow":
            if not entered.is_set():
                entered.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            released.wait(WAIT_S)
            return self

    with no_thread_left():
        with pytest.raises(KeyboardInterrupt):
            connect(own(Slow(), 3))
        assert entered.is_set()
        released.set()
    assert list(folder.iterdir()) == []


# --- The end of the program -------------------------------------------------------------------------------

PROGRAM = """
import sys, threading
import numpy as np
import trocar
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Identity()

    def forward(self, x):
        if not x.is_meta and x.shape[0] == 2:
            print("busy", flush=True)
            while True:
                self.step(x)
        return self.step(x)

client = trocar.connect("local", models={"net": {"module": Net(), "input_shape": (3,)}})
print(client.extract("net", np.ones((1, 3), "float32"), taps="step")["step"].sum())
"""

# A pass ends behind its last tap: this one never does.
BUSY = 'client.extract("net", np.ones((2, 3), "float32"), taps=["step", "/out"])\n'


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], "subprocess.Popen[str]"]:
    """Starts a Python program whose sockets go to `tmp_path`."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TROCAR_DEVICE": "cpu"}

    def start(source: str) -> "subprocess.Popen[str]":
        return warm_python.Popen(
            [sys.executable, "-W", "error", "-c", source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start


def test_a_program_that_forgets_to_close_ends_and_says_nothing(
    program: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    with program(PROGRAM) as running:
        out, error = running.communicate(timeout=WAIT_S)
    assert (out, error, running.returncode) == ("3.0\n", "", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_program_ends_in_the_middle_of_a_call_of_another_thread(
    program: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    call = f"threading.Thread(target=lambda: {BUSY.strip()}, daemon=True).start()\nsys.stdin.read()\n"
    with program(PROGRAM + call) as running:
        out, _ = running.communicate(input="", timeout=WAIT_S)
    assert (out.splitlines()[0], running.returncode) == ("3.0", 0)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_call_ends_the_program(
    program: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    with program(PROGRAM + BUSY) as running:
        assert running.stdout is not None
        assert [running.stdout.readline().strip() for _ in range(2)] == ["3.0", "busy"]
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=WAIT_S)
    assert error.strip().endswith("KeyboardInterrupt")
    assert running.returncode == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []


def test_the_answers_do_not_depend_on_where_the_server_is(server: RunningServer) -> None:
    with trocar.connect(server.address) as remote, connect(PLAIN) as local:
        assert str(local.modules("plain")) == str(remote.modules("plain"))
