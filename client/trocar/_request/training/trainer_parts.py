"""Parts of a trainer: heads, adapters, gradient edits, saved tensors. The server checks them all at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trocar._base.delegation import explained
from trocar._request.edit_operations import operation_options
from trocar._request.training.trainer_options import (
    Selectors,
    flag,
    number,
    options_to_wire,
    selectors,
    text,
    whole,
)
from trocar_api.byte_sizes import byte_count
from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.value_words import not_one_of


@dataclass(frozen=True)
class Head:
    """A new classifier; made by `head`."""

    classes: int
    hidden: tuple[int, ...] = ()
    dropout: float = 0.0
    init: str = "default"
    bias: bool = True
    path: str = ""
    of: str = ""

    def to_wire(self) -> pb.HeadSpec:
        """Return the message."""
        return pb.HeadSpec(
            path=text("path", self.path),
            classes=whole("classes", self.classes, bits=32),
            hidden=[whole("hidden", width, bits=32) for width in self.hidden],
            dropout=number("dropout", self.dropout),
            init=text("init", self.init),
            bias=flag("bias", self.bias),
            of=text("of", self.of),
        )


@explained
def head(
    classes: int,
    *,
    hidden: Sequence[int] = (),
    dropout: float = 0.0,
    init: str = "default",
    bias: bool = True,
    path: str = "",
    of: str = "",
) -> Head:
    """Return a new classifier for `Client.train`.

        client.train("resnet18", head=trocar.training.head(10, hidden=[256], dropout=0.1))
        client.train("minilm", head=trocar.training.head(3, of="sentence"))

    Args:
        classes: Its outputs.
        hidden: Widths of hidden layers, each followed by a ReLU; none for a single Linear.
        dropout: Probability of dropout before each layer.
        init: "default" (torch's own), "zeros", "normal" (deviation 0.01), "xavier" or "kaiming" (uniform).
        bias: Whether its layers have biases.
        path: The module that it replaces; when empty, the server finds the classifier.
        of: Adds the head to a text model that has none: "sentence", on the vector of each text (its sentence
            embedding, else its pooler's output, else the mean of its tokens), or "tokens", on the last hidden
            states. The model then returns `logits`.
    """
    return Head(classes, tuple(hidden), dropout, init, bias, path, of)


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter; made by `lora`."""

    ranks: tuple[tuple[str, int], ...]
    alpha: float | Mapping[str, float] = 8.0
    dropout: float = 0.0
    use_rslora: bool = False
    folder: Path | None = None
    """Folder of PEFT with its initial weights; None for new ones."""
    name: str = ""

    def to_wire(self) -> pb.LoraSpec:
        """Return the message."""
        own = self.alpha if isinstance(self.alpha, Mapping) else {}
        unknown = sorted(own.keys() - {pattern for pattern, _ in self.ranks})
        if unknown:
            raise ValueError(f"alpha names {unknown[0]!r}, which has no rank")
        entries = [
            pb.LoraRankSpec(
                selector=text("pattern", pattern),
                rank=whole("rank", rank, bits=32),
                alpha=number("alpha", own[pattern]) if pattern in own else None,
            )
            for pattern, rank in self.ranks
        ]
        wrong = [entry.rank for entry in entries if entry.rank < 1]
        if wrong:
            raise ValueError(f"a rank is {wrong[0]}; it is at least 1")
        alpha = None if isinstance(self.alpha, Mapping) else number("alpha", self.alpha)
        return pb.LoraSpec(
            ranks=entries,
            alpha=alpha,
            dropout=number("dropout", self.dropout),
            use_rslora=flag("use_rslora", self.use_rslora),
            name=text("name", self.name),
        )


@explained
def lora(
    ranks: Mapping[str, int] | int = 8,
    *,
    alpha: float | Mapping[str, float] = 8.0,
    dropout: float = 0.0,
    use_rslora: bool = False,
    name: str = "",
) -> Lora:
    """Return a LoRA adapter for `Client.train`, which PEFT creates on the server.

        adapter = trocar.training.lora({"*.q_proj": 16, "*.mlp.*": 8}, alpha=32)
        client.train("gpt2", adapter=adapter, losses="causal_lm")

    Args:
        ranks: Rank by pattern; a layer gets the rank of the first pattern that matches its path. `*` matches
            any text, including dots. Without `*` the pattern is the path or its last components; with `^` at
            its start it is the whole path. A single number is the rank of every linear layer and convolution.
            Weights of experts that are stacked in one parameter need a pattern: "*.experts.*".
        alpha: The update is multiplied by alpha / rank; a number, or numbers by pattern (8 for the others).
        dropout: Probability of dropout before the adapter; 0 with stacked experts.
        use_rslora: Whether the update is multiplied by alpha / sqrt(rank) instead.
        name: Its name in your calls, `client.extract(..., adapter="style")`: letters, digits and `._-`, at
            most 64 characters, unique for each model.
    """
    if not isinstance(ranks, int | Mapping):
        raise TypeError(f"ranks is {ranks!r:.60}; give a whole number, or a rank by pattern")
    chosen = {"*": ranks} if isinstance(ranks, int) else ranks
    return Lora(tuple(chosen.items()), alpha, dropout, use_rslora, name=name)


@dataclass(frozen=True)
class GradientEdit:
    """A declared change to gradients; made by `gradient_edit`."""

    selector: str | Sequence[str]
    name: str
    options: Mapping[str, object]
    when: Literal["batch", "accumulated"] = "batch"

    def to_wire(self) -> pb.GradientEditSpec:
        """Return the message."""
        first, *more = selectors(self.selector, "selector") or ("",)
        return pb.GradientEditSpec(
            selector=first,
            name=text("name", self.name),
            options=options_to_wire(self.options),
            selectors=more,
            when=None if self.when == "batch" else text("when", self.when),
        )


@explained
def gradient_edit(
    selector: str | Sequence[str],
    operation: str,
    /,
    *values: float | None,
    when: Literal["batch", "accumulated"] = "batch",
    **options: object,
) -> GradientEdit:
    """Return a change to gradients, with the operations of `trocar.edit`.

        gradient_edit("fc.*", "clamp", -0.1, 0.1)
        gradient_edit("layer4", "normalise", max_norm=1.0)                        # of each tensor
        gradient_edit(["layer4", "fc"], "clip_norm_of_all", max_norm=1.0)         # of all together
        gradient_edit("**", "zero_if", nonfinite=True, mode="any")                # drop a broken batch
        gradient_edit("fc.*", "clamp", low=-1, high=1, when="accumulated")        # of the sum

    Args:
        selector: Parameters ("fc.*", "layer4", "fc.bias") or the gradient at a value ("layer4/grad_out"); a
            list of these for several.
        operation: "clamp" (low, high), "scale" (factor), "zero", "noise" (scale), "nan_to_num" (nan, posinf,
            neginf) or "normalise" (max_norm: the maximum Euclidean norm of each tensor). Over the set of all
            selected parameters: "clip_norm_of_all" (max_norm: of all together) and "zero_if": zeros for all
            if a condition holds, a norm `above` or `below` a number or a `nonfinite` element; with mode="all"
            for all together, with mode="any" for one of them. NaN stays NaN where nothing is said of it.
        *values: Its first options, in the order above.
        when: "batch": on the gradients of each backward pass; "accumulated": on the sum, each time that a
            backward pass has added to it, as `register_post_accumulate_grad_hook` does. Parameters only.
        **options: Its options by name.

    Raises:
        TypeError: There are more values than the operation has options, or one is given twice.
        ValueError: There is no such operation.
    """
    if operation not in (*_OF_EDITS, *_OF_SETS):
        raise ValueError(f"the operation {not_one_of(operation, (*_OF_EDITS, *_OF_SETS))}")
    names = _OF_SETS[operation] if operation in _OF_SETS else operation_options(operation)
    if len(values) > len(names):
        own = ", ".join(names) or "it takes options by name alone"
        raise TypeError(f"{operation} takes {len(names)} values ({own}), not {len(values)}")
    given = {name: value for name, value in zip(names, values, strict=False) if value is not None}
    if twice := sorted(given.keys() & options.keys()):
        raise TypeError(f"{operation} has {twice[0]} twice")
    return GradientEdit(selector, operation, {**given, **options}, when)


_OF_EDITS = ("clamp", "scale", "zero", "noise", "nan_to_num", "normalise")
"""Operations of `trocar.edit` that change gradients, too, with the same options; the server checks these."""
_OF_SETS = {"clip_norm_of_all": ("max_norm",), "zero_if": ()}
"""Operations on several gradients together, with the options that may be given without their names."""


@dataclass(frozen=True)
class SavedTensors:
    """Storage of autograd's saved tensors; made by `save_on_disk` or `save_on_host`."""

    store: str
    budget_bytes: int = 256 << 20
    modules: tuple[str, ...] = ()
    min_bytes: int = 32 << 10
    store_dtype: str = ""
    device_bytes: int = 0

    def to_wire(self) -> pb.SavedTensorsSpec:
        """Return the message."""
        return pb.SavedTensorsSpec(
            store=self.store,
            budget_bytes=whole("budget_bytes", self.budget_bytes),
            modules=self.modules,
            min_bytes=whole("min_bytes", self.min_bytes),
            store_dtype=text("store_dtype", self.store_dtype),
            device_bytes=whole("device_bytes", self.device_bytes),
        )


@explained
def save_on_disk(
    budget_bytes: int | str = 256 << 20,
    *,
    modules: Selectors = (),
    min_bytes: int | str = 32 << 10,
    store_dtype: str = "",
    device_bytes: int | str = 0,
) -> SavedTensors:
    """Keep saved tensors in memory within a budget, and write the rest to the server's disk.

    Args:
        budget_bytes: The maximum number of bytes in memory, as a number or a text such as "256MiB".
        modules: Only tensors that these modules save; all when empty.
        min_bytes: Smaller tensors stay in memory.
        store_dtype: "bf16" or "int8" for less precision on disk; exact when empty.
        device_bytes: How much of a forward pass stays on a GPU: what it saves last, as the backward pass
            needs that first. Copies take longer than most passes; this is the way to have few of them.

    Raises:
        TypeError: A size is neither a whole number nor a text.
        ValueError: A text is not a size.
    """
    budget, least = byte_count(budget_bytes, "budget_bytes"), byte_count(min_bytes, "min_bytes")
    on_device = byte_count(device_bytes, "device_bytes")
    paths = tuple(selectors(modules, "modules"))
    return SavedTensors("spool", budget, paths, least, store_dtype, on_device)


@explained
def save_on_host() -> SavedTensors:
    """Keep autograd's saved tensors in the host's memory instead of the GPU's."""
    return SavedTensors("host")
