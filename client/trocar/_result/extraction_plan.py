"""Extraction plan: outputs and resources of a request, from a dry run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trocar._base.tables import html_table
from trocar._base.text_tables import text_table
from trocar._result.feature_maps import FeatureMapInfo

_HEAD = ("name", "shape", "dtype", "bytes")


@dataclass(frozen=True)
class ExtractionPlan:
    """A checked request; prints as a table.

    plan = client.plan("resnet50", (8, 3, 224, 224), taps=["layer*"])
    plan.feature_maps["layer4"].shape    # (8, 2048, 7, 7)
    """

    model_id: str
    """The model that was asked."""
    feature_maps: Mapping[str, FeatureMapInfo]
    """What the reply would have, by name or selector: shapes, dtypes, bytes."""
    expansions: Mapping[str, tuple[str, ...]]
    """The names that each selector became, in execution order."""
    stopped_at: str | None
    """The module after which the pass would stop; None when it would run to its end."""
    reply_bytes: int
    """Bytes of values in the reply."""
    request_bytes: int
    """Bytes of the inputs."""
    memory_bytes: int
    """The most memory on the device that the pass needs at once beside the weights; an estimate."""
    is_symbolic: bool
    """Whether this is true of any data with this signature. If not, control flow depends on data, and this
    describes one pass on random data."""
    edit_expansions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the values that each edit's selector became."""

    def __str__(self) -> str:
        edits = [f"edits {selector}: {', '.join(names)}" for selector, names in self.edit_expansions.items()]
        return "\n".join([text_table(_HEAD, self._rows(), ("bytes",)), *edits, self._summary()])

    def __repr__(self) -> str:
        return (
            f"<ExtractionPlan of {self.model_id}, {len(self.feature_maps)} feature maps: {self._summary()}>"
        )

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        edits = [(selector, ", ".join(names)) for selector, names in self.edit_expansions.items()]
        table = html_table(_HEAD, self._rows(), self._summary())
        return table + (html_table(("edits", "change"), edits) if edits else "")

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for name, entry in self.feature_maps.items():
            size = f"{entry.byte_count:,}" if entry.has_values else "statistics only"
            yield name, str(entry.shape), entry.dtype, size

    def _summary(self) -> str:
        end = f"stops after {self.stopped_at}" if self.stopped_at else "runs to its end"
        return (
            f"{self.reply_bytes:,} bytes back for {self.request_bytes:,} bytes of inputs; about "
            f"{self.memory_bytes:,} bytes of memory; the pass {end}"
        )
