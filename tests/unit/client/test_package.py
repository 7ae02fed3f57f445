"""What importing the package costs and offers, and that its generated part is fresh."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

import trocar
from tests.support import ROOT
from trocar._wire.trainer_requests import TrainerOptions


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = {"torch", "PIL", "matplotlib", "rich", "typer", "trocar_server", "trocar._async"}
    code = f"import sys, trocar; print(sorted({heavy!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_sync_client_is_fresh() -> None:
    script = ROOT / "tools" / "generate_sync.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_stale_sync_client_would_be_noticed() -> None:
    text = (ROOT / "client" / "trocar" / "_sync" / "client.py").read_text()
    assert "async" not in text.partition("\n")[2].replace("asyncio", "")
    assert "await" not in text


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(trocar.Client) == methods(trocar.AsyncClient)


CLIENTS = [trocar.Client, trocar.AsyncClient]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_made_of_parts(client: type) -> None:
    assert client.__mro__ == (client, object)


@pytest.mark.parametrize("client", CLIENTS)
def test_methods_of_parts_show_their_own_signature_and_docstring(client: type) -> None:
    parts = {
        "extract": ("extraction", "Extraction"),
        "gradients": ("gradients", "Gradients"),
        "health": ("analysis.analyses", "Analyses"),
        "train": ("trainers", "Trainers"),
    }
    is_async = client is trocar.AsyncClient
    for name, (module, part) in parts.items():
        folder, prefix = ("_async", "Async") if is_async else ("_sync", "")
        owner = getattr(importlib.import_module(f"trocar.{folder}.{module}"), prefix + part)
        method, own = getattr(client, name), getattr(owner, name)
        assert inspect.signature(method) == inspect.signature(own)
        assert inspect.getdoc(method) == inspect.getdoc(own)
        assert inspect.iscoroutinefunction(method) == is_async


@pytest.mark.parametrize("client", CLIENTS)
def test_every_public_method_has_named_arguments_and_a_docstring(client: type) -> None:
    for name, method in inspect.getmembers(client, inspect.isfunction):
        if not name.startswith("_"):
            kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
            assert inspect.Parameter.VAR_POSITIONAL not in kinds, name
            assert (inspect.Parameter.VAR_KEYWORD in kinds) == (name == "attribute")
            assert inspect.getdoc(method), name


def test_train_takes_the_fields_of_its_options() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(TrainerOptions)}
    parameters = dict(inspect.signature(trocar.Client.train).parameters)
    del parameters["self"], parameters["model_id"], fields["model_id"]
    assert {name: parameter.default for name, parameter in parameters.items()} == fields
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_the_version_is_the_installed_one() -> None:
    assert trocar.__version__ == version("trocar")


def test_the_spool_is_the_servers() -> None:
    from trocar_server.spool import Spool

    assert trocar.Spool is Spool


@pytest.mark.parametrize("missing", ["torch", "trocar_server.spool"])
def test_the_spool_without_the_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'trocar\.Spool needs .*: pip install "trocar\[server\]"'):
        _ = trocar.Spool


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Spoon'"):
        getattr(trocar, "Spoon")  # noqa: B009 - type checkers know that there is none


@pytest.mark.parametrize(
    ("name", "place"),
    [("UnknownModelError", "trocar.errors.UnknownModelError"), ("adamw", "trocar.training.adamw")],
)
def test_a_name_of_a_module_says_of_which(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; it is {place}$"):
        getattr(trocar, name)


def test_everything_public_is_there() -> None:
    for module in (trocar, trocar.errors, trocar.training, trocar.aio):
        assert all(hasattr(module, name) for name in module.__all__)
    assert len(trocar.__all__) <= 140
    public_errors = {
        name
        for name, value in vars(trocar.errors).items()
        if isinstance(value, type) and issubclass(value, trocar.TrocarError)
    }
    assert public_errors <= set(trocar.errors.__all__)
    assert {name for name in trocar.__all__ if name.endswith("Error")} == {
        "TrocarError",
        *(kind.__name__ for kind in trocar.TrocarError.__subclasses__() if kind.__name__ in public_errors),
    }
