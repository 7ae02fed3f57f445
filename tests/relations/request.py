"""One request as data, which can be asked in several ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import trocar
from tests.relations.family import Family
from tests.relations.layouts import Place
from trocar._base.call_options import AS_CONNECTED
from trocar._request.execution import execution_of
from trocar._request.surgery import make_surgery
from trocar._wire.requests import FROM_INPUT, extract_call
from trocar_api.v1 import extraction_pb2

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """One tap of a request, and what its value is without Trocar."""

    tap: trocar.Tap
    place: Place
    rows: int | None
    """The dimension of the samples in what is sent; None if it has none that is known."""
    is_cut: bool = True
    """Whether dimensions are as at the place, so that padding can be cut away."""


@dataclass(frozen=True)
class Request:
    """Everything of a request but its model and its inputs.

    Attributes:
        wanted: What is tapped.
        edits: Edits.
        of: The objective for so many samples.
        sources: Further inputs, by the name that swaps use.
        options: What `trocar.options` takes.
    """

    wanted: tuple[Wanted, ...]
    edits: tuple[trocar.Edit, ...] = ()
    of: Callable[[int], trocar.Objective] | None = None
    sources: Mapping[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=dict)

    @property
    def taps(self) -> list[trocar.Tap]:
        """Return the taps, in order."""
        return [wanted.tap for wanted in self.wanted]

    def arguments(self, batch: int) -> dict[str, Any]:
        """Return the keyword arguments of `extract` for so many samples."""
        given: dict[str, Any] = {"options": trocar.options(**self.options)} if self.options else {}
        if self.edits:
            given["edits"] = self.edits
        if self.of is not None:
            given["of"] = self.of(batch)
        if self.sources:
            given["sources"] = self.sources
        return given

    def with_options(self, **options: Any) -> "Request":
        """Return it with further options, or others."""
        return replace(self, options={**self.options, **options})

    def ask(self, client: trocar.Client, family: Family, inputs: Any, batch: int = 3) -> trocar.FeatureMaps:
        """Ask for it with `extract`."""
        return client.extract(family.name, inputs, self.taps, **self.arguments(batch))

    def message(self, family: Family, inputs: Any, batch: int = 3) -> extraction_pb2.ExtractRequest:
        """Return it as sent."""
        given = self.arguments(batch)
        surgery = make_surgery(given.pop("edits", ()), given.pop("of", None), given.pop("sources", None))
        how = given.pop("options", AS_CONNECTED)
        call = extract_call(
            family.name,
            inputs,
            self.taps,
            how.chunk_bytes,
            FROM_INPUT,
            surgery,
            execution_of(how),
            how.wire,
        )
        return extraction_pb2.ExtractRequest.FromString(call.head)

    def with_taps(self, wanted: tuple[Wanted, ...]) -> "Request":
        """Return it with other taps."""
        return replace(self, wanted=wanted)
