"""Repeatability: whether a model gives equal replies to equal requests, and what its passes write to.

    if examine(hosted):
        ...

Note: [Two equal passes]
A model is run twice when it is loaded, as its calls will be run: one that counts its calls, keeps state in
plain attributes or reads the clock gives different values in one of its modules. It is stateful, and each
reply says so. Tensors that a pass wrote to, as its operators and a comparison show, are not state: each call
has its own copies of them. Torch's generators start alike; whether they are drawn from decides whether a
reply may be cached. A random branch that only some data take, and the example input does not, is detected in
the pass itself: the state of torch's generator has changed (`watching_draws`). Dropout in eval mode draws
nothing and is fine. A model that escapes both checks, with a generator of its own in a rare branch, must not
be served with a feature cache.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trocar_server.engine.execute.collecting import copied_arguments
from trocar_server.engine.host.recordings import Called, examples, to_meta
from trocar_server.models import HostedModel, make_meta_replica, make_training_copy
from trocar_server.models.replicas import kept_tensors
from trocar_server.storage.tensor_bytes import bytes_of
from trocar_server.surgery.recording.recording import all_tensors
from trocar_server.surgery.recording.writes import WriteJournal, WriteWatch
from trocar_server.surgery.structure import leaves
from trocar_server.tensors.bits import same_bits


def examine(hosted: HostedModel) -> bool:
    """Run two passes on the model's example input; note what they write to, and whether they differ.

    They run on trees of their own, and leave nothing. Owner thread only.

    Returns:
        Whether the passes agree in every bit of every module, and draw no random numbers.
    """
    for called in examples(hosted):
        for mode in (torch.inference_mode, torch.no_grad):
            with suppress(_PassFailedError):  # for example because it takes integers
                return _agree(hosted, called, mode())
    return False


def written_by(module: nn.Module, hosted: HostedModel) -> frozenset[str]:
    """Return the names of the parameters and buffers that a pass of a tree in its modes writes to.

    Args:
        module: A tree over the memory of the model; it is left as it is.
        hosted: The model, for its example input.
    """
    for args, keywords in examples(hosted):
        with suppress(Exception), torch.no_grad():  # a model that reads its data, or takes integers
            meta = make_meta_replica(module)
            tensors, watch = all_tensors(meta), WriteWatch()
            with watch:
                meta(*to_meta(args), **dict(zip(keywords, to_meta(tuple(keywords.values())), strict=True)))
            return frozenset(name for name, tensor in tensors.items() if watch.last_write(tensor))
    for called in examples(hosted):
        journal = WriteJournal(all_tensors(own := make_training_copy(module, ())))
        is_whole = False
        with torch.random.fork_rng(devices=[hosted.device] if hosted.device.type == "cuda" else []):
            with suppress(Exception), torch.no_grad(), journal:
                own(*copied_arguments(called)[0], **copied_arguments(called)[1])
                is_whole = True
            written = journal.put_back()
        if is_whole:
            return written
    return frozenset()


class _PassFailedError(Exception):
    """The model raised an error, of whatever kind."""


@dataclass(frozen=True)
class _Observed:
    """One pass: the digest of its values, whether it wrote to tensors and whether it drew random numbers."""

    digest: bytes
    has_written: bool
    has_drawn: bool


def _agree(hosted: HostedModel, called: Called, mode: AbstractContextManager[object]) -> bool:
    pristine, device = hosted.pristine, hosted.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        module = pristine.apart()
        first = _observed(hosted, module, called, mode)
        if first.has_written:
            module = pristine.apart()
        second = _observed(hosted, module, called, mode)
    if first.digest != second.digest:
        pristine.note_state()
    return first.digest == second.digest and not (first.has_drawn or second.has_drawn)


def _observed(
    hosted: HostedModel, module: nn.Module, called: Called, mode: AbstractContextManager[object]
) -> _Observed:
    """Run a pass on a tree of its own, and note the tensors that it wrote to."""
    before = all_tensors(module)
    marks = {name: _mark(tensor) for name, tensor in before.items()}
    journal, kept = WriteJournal(before), kept_tensors(module)
    # Not modules that a first pass makes: only a second one would have their values.
    parts = [module.get_submodule(path) for path, _ in hosted.module.named_modules()]
    try:
        torch.manual_seed(0)
        with watching_draws(hosted.device) as draws, journal, mode:
            digest = _digest_of_pass(parts, module, copied_arguments(called))
    except Exception as error:
        raise _PassFailedError from error
    finally:
        written = set(journal.put_back())
    after = all_tensors(module)
    has_replaced = before.keys() != after.keys() or any(after[name] is not before[name] for name in before)
    written |= {name for name, mark in marks.items() if mark != _mark(before[name])}
    written |= _changed_buffers(hosted.module, before)
    hosted.pristine.note(written)
    hosted.pristine.keeps_tensors |= bool(kept_tensors(module) - kept)
    return _Observed(digest, has_replaced or bool(written), draws.has_drawn)


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's version and address."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _changed_buffers(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the buffers whose copies in `tensors` have other values: some writes show nowhere else."""
    pairs = [(name, buffer, tensors[name]) for name, buffer in module.named_buffers(remove_duplicate=False)]
    return {name for name, own, copy in pairs if own.layout is torch.strided and not same_bits(own, copy)}


class Draws:
    """Draws from torch's random generators inside a context."""

    has_drawn = False
    """Whether any were drawn; known when the context has ended."""


@contextmanager
def watching_draws(device: torch.device) -> Iterator[Draws]:
    """Detect draws from torch's own generators inside the context: costs 5 us. Owner thread only."""
    draws, before = Draws(), _states(device)
    try:
        yield draws
    finally:
        after = _states(device)
        draws.has_drawn = not all(map(torch.equal, before, after))


def _states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _digest_of_pass(parts: Iterable[nn.Module], module: nn.Module, called: Called) -> bytes:
    digest = hashlib.sha256()

    def note(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        for _picks, leaf in leaves(output):
            if isinstance(leaf, torch.Tensor):
                dense = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
                digest.update(bytes_of(dense).numpy().data)

    with ExitStack() as hooks:
        for part in parts:
            hooks.callback(part.register_forward_hook(note).remove)
        args, keywords = called
        module(*args, **keywords)
    return digest.digest()
