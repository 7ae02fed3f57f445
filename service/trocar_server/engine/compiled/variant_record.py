"""Record of a kept variant: what is needed to use its files in another process."""

from collections.abc import Mapping
from typing import Self

import torch

from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.compiled.backends.folding import Pair
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.request.numerics import Numerics
from trocar_server.models.identity import digest_of
from trocar_server.storage.sealed_record import Record
from trocar_server.surgery import Target


class ArgumentRecord(Record):
    """An `ArgumentSpec`."""

    dtype: str
    row_shape: tuple[int, ...]
    keyword: str


class TargetRecord(Record):
    """A `Target` of a module's call."""

    name: str
    path: str
    call: int
    port: str
    picks: tuple[int | str, ...]
    clone: bool
    view: tuple[int, ...]


class VariantRecord(Record):
    """A variant that was accepted.

    Attributes:
        model: The digest of the identity of its model.
        environment: The `environment_digest` of the process that built it.
        asked: The loosest numerics that its callers accept.
        arguments: Of its recipe.
        targets: Of its recipe.
        engine: The backend that was accepted.
        numerics: The numerics of that backend's values.
        pairs: Batch norms that can be folded.
        mixed_rows: Why calls may not share a pass; empty where rows are independent.
        files: The sha256 of each file beside the record, by name.
    """

    model: str
    environment: str
    asked: Numerics
    arguments: tuple[ArgumentRecord, ...]
    targets: tuple[TargetRecord, ...]
    engine: str
    numerics: Numerics
    pairs: tuple[Pair, ...]
    mixed_rows: str
    files: Mapping[str, str]

    @classmethod
    def of(
        cls,
        identity: tuple[str, str],
        recipe: Recipe,
        asked: Numerics,
        used: tuple[str, Numerics],
        built: Built,
    ) -> Self:
        """Describe a variant.

        Args:
            identity: The digests of the model's identity and of the environment.
            recipe: Its values.
            asked: The loosest numerics that its callers accept.
            used: The engine and the numerics of the accepted backend.
            built: The result of the build process.
        """
        return cls(
            model=identity[0],
            environment=identity[1],
            asked=asked,
            arguments=tuple(
                ArgumentRecord(dtype=_dtype_name(spec.dtype), row_shape=spec.row_shape, keyword=spec.keyword)
                for spec in recipe.arguments
            ),
            targets=tuple(
                TargetRecord(
                    name=target.name,
                    path=target.path,
                    call=target.call,
                    port=target.port,
                    picks=target.picks,
                    clone=target.clone,
                    view=target.view,
                )
                for target in recipe.targets
            ),
            engine=used[0],
            numerics=used[1],
            pairs=built.pairs,
            mixed_rows=built.mixed_rows,
            files={},
        )

    @property
    def key(self) -> str:
        """The name of its folder: a digest of the model, the environment, the recipe and what was asked."""
        parts = self.model_dump(
            mode="json", include={"model", "environment", "asked", "arguments", "targets"}
        )
        return digest_of(parts)

    @property
    def recipe(self) -> Recipe:
        """The values that it computes.

        Raises:
            ValueError: torch has no such dtype.
        """
        return Recipe(
            tuple(ArgumentSpec(_dtype(spec.dtype), spec.row_shape, spec.keyword) for spec in self.arguments),
            tuple(Target(**target.model_dump()) for target in self.targets),
        )

    @property
    def built(self) -> Built:
        """The result of the build process, without what the accepted backend does not need."""
        return Built(self.pairs, has_graph=bool(self.files), mixed_rows=self.mixed_rows)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    result = getattr(torch, name, None)
    if not isinstance(result, torch.dtype):
        raise ValueError(f"torch has no dtype '{name[:40]}'")
    return result
