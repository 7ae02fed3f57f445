"""No test here reaches the network: what torchvision would download comes from `published`."""

import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, load_model, parse_model_argument

CPU = torch.device("cpu")


class Downloads:
    """What stands for the network: file names that were asked for, and state dicts to answer with."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.published: dict[str, bytes] = {}

    def publish(self, url: str, state: Mapping[str, Tensor]) -> None:
        file = io.BytesIO()
        torch.save(state, file)
        self.published[url] = file.getvalue()

    def download(self, url: str, target: str, hash_prefix: str | None = None, progress: bool = True) -> None:
        self.asked.append(url)
        if url not in self.published:
            raise URLError("the network is unreachable")
        Path(target).write_bytes(self.published[url])


@pytest.fixture(autouse=True)
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Downloads:
    fake = Downloads()
    monkeypatch.setattr(torch.hub, "download_url_to_file", fake.download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch_home"))
    return fake


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def load(argument: str, data_dir: Path | None = None) -> HostedModel:
    """Load a model as the command line names it; without a data directory, once for all tests."""
    return load_model(parse_model_argument(argument), CPU, data_dir) if data_dir else _load_once(argument)


@cache
def _load_once(argument: str) -> HostedModel:
    return load_model(parse_model_argument(argument), CPU, Path("unused"))


def reason_of(error: pytest.ExceptionInfo[ServiceError]) -> ErrorReason:
    return error.value.reason


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    """Compare names, values and dtypes of all parameters and buffers, bit for bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
