"""The files that deploy a server: read, and what all of them have to say alike."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support import ROOT
from trocar_server.config import ServerConfig

DEPLOY = ROOT / "deploy"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
"""As systemd, Compose and Kubernetes write memory."""

CHECKPOINTS_S = 30
"""What a stopping server may need after its grace: trainers are saved then."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its lines put together."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """What an exec form lists; an error for the shell form."""
        found = json.loads(self.text[self.text.index("[") :])
        assert isinstance(found, list)
        return found


def stages(path: Path = ROOT / "Dockerfile") -> list[list[Instruction]]:
    """Return the instructions of each stage; those before the first are a stage of their own."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: list[list[Instruction]] = [[]]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, text = line.split(maxsplit=1)
            if name == "FROM":
                found.append([])
            found[-1].append(Instruction(name, text))
    return found


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets."""
    texts = [entry.text for entry in stages()[-1] if entry.name == "ENV"]
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(texts)))


def settings_of(environment: dict[str, str]) -> dict[str, str]:
    """Return those variables that are meant for the server, by setting."""
    return {
        name.removeprefix("TROCAR_").lower(): value
        for name, value in environment.items()
        if name.startswith("TROCAR_")
    }


def unknown_settings(environment: dict[str, str]) -> set[str]:
    """Return which variables name settings that no server has."""
    return set(settings_of(environment)) - set(ServerConfig.model_fields)


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file."""
    with path.open() as file:
        return list(yaml.safe_load_all(file))


def memory(text: str) -> int:
    """Return the bytes of 512m, 8G or 2Gi."""
    match = re.fullmatch(r"(\d+)([KMG]i?)", text[0:-1] + text[-1].upper() if text[-1] in "kmg" else text)
    assert match, text
    return int(match[1]) * UNITS[match[2]]
