"""What importing the package costs and offers, and that its generated part is fresh."""

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import trocar

ROOT = Path(__file__).parents[3]


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = {"torch", "PIL", "matplotlib", "rich", "typer", "trocar_server"}
    code = f"import sys, trocar; print(sorted({heavy!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_sync_client_is_fresh() -> None:
    script = ROOT / "tools" / "generate_sync.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_stale_sync_client_would_be_noticed() -> None:
    text = (ROOT / "client" / "trocar" / "_client.py").read_text()
    assert "async" not in text.replace("asyncio", "")
    assert "await" not in text


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(trocar.Client) == methods(trocar.AsyncClient)


def test_the_version_is_the_installed_one() -> None:
    assert trocar.__version__ == version("trocar")


def test_everything_public_is_there() -> None:
    assert all(hasattr(trocar, name) for name in trocar.__all__)
    public_errors = {
        name
        for name, value in vars(trocar.errors).items()
        if isinstance(value, type) and issubclass(value, trocar.TrocarError)
    }
    assert public_errors <= set(trocar.__all__)
