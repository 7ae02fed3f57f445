"""Model source: a library and what it builds: `timm:NAME`, `hf:...`, `torchvision:NAME`.

    parse_source("timm:vit_small_patch16_224")
    parse_source("hf:./folder#feature-extraction")                   # a folder of this machine
    parse_source("hf:org/name@<commit of 40 hex digits>")            # the Hugging Face Hub, pinned

Nothing is imported or read here.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

PREFIXES = ("timm:", "hf:", "torchvision:")
"""How a source begins. A factory of such a module is given as `factory`, never as a source."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PACKAGES = {"timm": ("timm",), "hf": ("transformers", "tokenizers", "huggingface_hub")}
_EXTRAS = {"timm": "timm", "hf": "transformers"}
_ID_CHARACTERS = 63


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed source.

    Attributes:
        library: `timm`, `hf` or `torchvision`.
        name: An architecture, a folder, or a repository of the Hub as `org/name`.
        revision: The commit of a repository; empty for a folder.
        task: The task or class that was named after `#`; empty for what the config says.
    """

    library: str
    name: str
    revision: str = ""
    task: str = ""

    @property
    def folder(self) -> Path | None:
        """The folder of this machine; None for a repository and for architectures."""
        if self.library != "hf" or self.revision:
            return None
        return Path(self.name).expanduser().absolute()  # the process may change its working directory

    @property
    def public_name(self) -> str:
        """The source without the folders above its own: clients see it."""
        name = self.name if self.revision or self.library != "hf" else _base_name(self.name)
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.library}:{name}{revision}" + (f"#{self.task}" if self.task else "")

    @property
    def model_id(self) -> str:
        """The id of a model that was given none: the last part of the name."""
        plain = re.sub(r"[^a-z0-9._-]+", "-", _base_name(self.name).lower()).lstrip("._-")
        return plain[:_ID_CHARACTERS] or "model"


def is_source(text: str) -> bool:
    """Whether a text names a source."""
    return text.startswith(PREFIXES)


def parse_source(text: str) -> Source:
    """Read a source.

    Raises:
        ServiceError: `MODEL_INVALID`, it names no library or no model, or a repository without its commit.
    """
    library, _, rest = text.partition(":")
    if not is_source(text) or not rest:
        raise invalid(
            f"'{text[:80]}' is not a source; write timm:NAME, hf:./FOLDER or torchvision:NAME. Weights are "
            "written random:0 or FILE.safetensors"
        )
    if library != "hf":
        return Source(library, rest)
    rest, task = _without_task(rest)
    if rest.startswith((".", "/", "~")) or PurePosixPath(rest).is_absolute():
        return Source(library, rest, task=task)
    name, _, revision = rest.partition("@")
    if not _REPOSITORY.fullmatch(name):
        raise invalid(
            f"'{rest[:80]}' is not a repository; write hf:org/name@COMMIT, or hf:./FOLDER for a folder"
        )
    if not _COMMIT.fullmatch(revision):
        given = f"'{revision[:60]}' may move" if revision else "it has no revision"
        raise invalid(
            f"hf:{name} is not pinned ({given}); write hf:{name}@COMMIT with the 40 hex digits of a commit "
            f"from https://huggingface.co/{name}/commits/main, or hf:./{name} for a folder"
        )
    return Source(library, name, revision, task)


def require_packages(source: Source) -> None:
    """Refuse a source whose library is not installed; nothing is imported.

    Raises:
        ServiceError: `MODEL_INVALID`, with the extra to install.
    """
    missing = [name for name in _PACKAGES.get(source.library, ()) if importlib.util.find_spec(name) is None]
    if missing:
        extra = _EXTRAS[source.library]
        raise invalid(f"{source.library}: needs {', '.join(missing)}; `pip install 'trocar[{extra}]'`")


def invalid(message: str) -> ServiceError:
    """Error for a source that cannot be hosted."""
    return ServiceError(ErrorReason.MODEL_INVALID, message)


def _without_task(text: str) -> tuple[str, str]:
    """Split `NAME#TASK`; a folder above that of the model may have a '#' in its name."""
    name, _, task = text.rpartition("#")
    return (name, task) if name and "/" not in task else (text, "")


def _base_name(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2]
