"""Systems on which the server does not run: one sentence, before anything else is imported."""

import subprocess
import sys

import pytest

_WINDOWS = """
import sys
import sysconfig

import trocar
from trocar._cli import main

sysconfig.get_config_vars()  # whose file has the name of this system
sys.platform = "win32"
for name in ("fcntl", "resource"):  # which Windows does not have
    sys.modules[name] = None
"""


def on_windows(*lines: str) -> subprocess.CompletedProcess[str]:
    """Run a program that takes this system for Windows once the client is imported."""
    code = "\n".join([_WINDOWS, *lines])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("serve", ["resnet18"]),
        ("admin convert", ["a.pth", "b.safetensors"]),
        ("admin token", ["list"]),
        ("doctor", []),
    ],
)
def test_a_command_of_the_server_says_on_windows_why_it_does_not_run(name: str, arguments: list[str]) -> None:
    ended = on_windows(f"main({[*name.split(), *arguments]})")
    assert ended.returncode == 2
    assert ended.stdout == ""
    said = " ".join(ended.stderr.split())
    assert f"`trocar {name}`: the server does not run on Windows" in said
    assert "the client runs on Windows" in said
    assert "Traceback" not in said


def test_a_server_in_the_own_process_is_refused_on_windows() -> None:
    ended = on_windows(
        "try:",
        "    trocar.connect('local', models=['resnet18=random:0'])",
        "except trocar.errors.ServerUnavailableError as error:",
        "    print(error)",
    )
    assert ended.stdout.startswith('connect("local"): the server does not run on Windows')
