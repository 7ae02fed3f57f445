"""Servers of families, and the ways to a model of them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import grpc

import trocar
from tests.relations.families import FAMILIES
from tests.relations.family import Family
from tests.support.servers.gateway import Gateway, is_serving
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import raw_channel

CACHE_BYTES = 64 << 20


def tables(names: Iterable[str]) -> dict[str, Any]:
    """Return the configuration of these families."""
    return {
        name: {
            "factory": "tests.relations.families:build",
            "arguments": [name],
            **_inputs(FAMILIES[name]),
        }
        for name in names
    }


def _inputs(family: Family) -> dict[str, Any]:
    """Return what is said of the inputs of a family that does not say it itself."""
    if family.input_shape:
        return {"input_shape": family.input_shape}
    if not family.says_nothing:
        return {}
    sizes: dict[str, int | str] = {**family.sizes, **dict.fromkeys(family.masks, "tokens")}
    return {
        "inputs": {
            name: {
                "dtype": "int64" if name.endswith(("_ids", "_mask")) else "float32",
                "shape": ["batch", *(sizes.get(letter) or int(letter) for letter in letters[1:])],
                "below": family.vocabulary if name.endswith("_ids") else 0,
            }
            for name, letters in family.axes.items()
        }
    }


class Hosts:
    """A server of families, and clients of it."""

    def __init__(self, server: RunningServer, stack: ExitStack, names: Iterable[str]) -> None:
        self.server, self.names = server, tuple(names)
        self._stack = stack
        self.client = self.connected(server.address)

    def connected(self, address: str, **options: Any) -> trocar.Client:
        """Return another client."""
        options = {"timeout_s": 600, "retries": 0, "options": trocar.options(cache=False), **options}
        return self._stack.enter_context(trocar.connect(address, **options))

    @cached_property
    def local(self) -> trocar.Client:
        """A client with a server of its own in this process, over a Unix socket."""
        models = {
            name: {"module": FAMILIES[name].build(), **_shape(FAMILIES[name])}
            for name in self.names
            if not FAMILIES[name].says_nothing
        }
        return self.connected("local", models=models, settings={"device": "cpu"})

    @cached_property
    def gateway(self) -> trocar.Client:
        """A client that reaches the server through a gateway process."""
        gateway = Gateway(self.server, models=self.names)
        self._stack.callback(gateway.stop)
        client = self.connected(gateway.address, direct=False)
        wait_until(lambda: is_serving(gateway))
        return client

    @cached_property
    def channel(self) -> grpc.Channel:
        """A bare channel, for the Open Inference Protocol."""
        return self._stack.enter_context(raw_channel(self.server.address))


def _shape(family: Family) -> dict[str, Any]:
    return {"input_shape": family.input_shape} if family.input_shape else {}


@contextmanager
def hosted(names: Iterable[str], **settings: Any) -> Iterator[Hosts]:
    """Host families in this process, with a cache of replies, for the length of the context."""
    names = tuple(names)
    limits = {"feature_cache_bytes": CACHE_BYTES, **settings.pop("limits", {})}
    settings.setdefault("engine", {"compile_after": 0})  # what is compiled has a tolerance: see `compiled.py`
    with ExitStack() as stack:
        server = stack.enter_context(
            running_server(models=tables(names), device="cpu", limits=limits, **settings)
        )
        yield Hosts(server, stack, names)
