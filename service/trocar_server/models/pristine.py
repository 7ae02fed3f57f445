"""Pristine model: a module tree that no pass runs on, and what passes of its replicas may write to.

    pristine = Pristine(module)
    tree = pristine.tree()      # for one pass; it shares the memory of all tensors that no pass writes to

# Note: [What a pass writes]
Replicas share the memory of parameters and buffers, so what one pass writes there would reach every later
call, of every caller, and the trainers of the model. A call is to be answered as by a freshly built model in
eval mode. So:
- Tensors that are known to be written to are copied for each pass, and the pass runs on a fresh tree, which
  is then dropped with whatever else the pass has kept in it. They are known from recorded passes and from the
  passes at load (`engine.host.repeatable`), which see every operator.
- All others are compared before and after each pass, by version, address and identity: `Replica.passing`. A
  buffer that was written to without notice gets its values back from a copy, and is known from then on.
- An entry that a pass has replaced (dynamic rotary embeddings) is in the tree of its replica only, which is
  then made anew.
- A model that gives different answers to equal calls, though no tensor was written to, keeps state in plain
  attributes: it runs on a fresh tree each time, too.
- A model may keep what it computes from its weights (LeViT its attention biases). On one tree a later pass
  would see the weights of an earlier one: edited, before a trainer's step, or without a graph. So its passes
  with edits or gradients run on a fresh tree, and all passes where the weights may change between them.
- A parameter that was written to without notice, and of which there is no copy, leaves a model that must not
  answer any more: it is refused until it is loaded again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trocar_server.models.replicas import copied_bytes, make_replica, make_training_copy

_MOST_COPIED_BYTES = 256 << 20
"""The most bytes of buffers, and as many of parameters whose writes cannot be foreseen, that are copied."""

_SMALL_BYTES = 16 << 20
"""Parameters of a model that has at most so many bytes of them are copied, too."""

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})


@dataclass(frozen=True)
class _Watched:
    """A parameter or buffer in shared memory.

    Attributes:
        name: Its first qualified name.
        tensor: The object that the trees share.
        alias: Another object over the memory that it had at load.
    """

    name: str
    tensor: Tensor
    alias: Tensor


class Pristine:
    """The original of a model's replicas. Owner thread only. See Note: [What a pass writes].

    Args:
        module: The model's tree; nobody runs it.
        written: Names of parameters and buffers that passes are known to write to.
        is_stateful: See below.
        copies_parameters: Whether copies of parameters may be kept; not where their versions do not tell of
            all changes between passes.

    Attributes:
        module: The tree.
        written: Names of parameters and buffers that each pass gets copies of.
        is_stateful: Whether equal passes differ, though they write to no tensor.
        is_renewed: Whether each pass runs on a fresh tree, for one of the two reasons.
        keeps_tensors: Whether its first pass makes tensors that later ones may use.
        is_shared: Whether the caller's process may change the weights at any time.
        refusal: Why the model must not be used any more; empty if it may.
        tensors: The watched tensors.
        is_fixed: Whether nothing but an unforeseen write changes them between passes.
        is_foreseen: Whether recorded passes show all writes to parameters; no where the model reads its data.
        versions: Their versions between passes; empty before the first pass.
        addresses: Their addresses, likewise.
    """

    def __init__(
        self,
        module: nn.Module,
        written: Iterable[str] = (),
        *,
        is_stateful: bool = False,
        copies_parameters: bool = True,
    ) -> None:
        self.module = module
        self.written = frozenset(written) | frozenset(_always_written(module))
        self.is_stateful = is_stateful
        self.is_renewed = bool(self.written) or is_stateful
        self.keeps_tensors = False
        self.refusal = ""
        self._named = dict(_named(module))
        self._watched = _watched(self._named)
        self.tensors = [each.tensor for each in self._watched]
        self._copies: dict[str, Tensor] = {}
        self._copied_at: dict[str, int] = {}
        self._copies_parameters = copies_parameters
        self.is_shared = False
        self._may_copy = self._chosen(_SMALL_BYTES)
        self.is_fixed = False
        self.is_foreseen = True
        self.versions: list[int] = []
        self.addresses: list[int] = []
        self._counted: tuple[frozenset[str], int] | None = None

    @property
    def copied_bytes(self) -> int:
        """Bytes that the tree of one pass takes beside the weights."""
        if not self.is_renewed:
            return 0
        if self._counted is None or self._counted[0] != self.written:
            self._counted = self.written, copied_bytes(self.module, self._owned())
        return self._counted[1]

    def tree(self) -> nn.Module:
        """Return a tree for one pass, with copies of the tensors that it may write to."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return make_replica(self.module, self._owned())

    def apart(self) -> nn.Module:
        """Return a tree for trials and recordings, with copies of all buffers as well.

        Its other parameters are other tensor objects over the same memory.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            owned = [tensor for tensor in self._owned() if isinstance(tensor, nn.Parameter)]
            return make_training_copy(self.module, owned).requires_grad_(False)

    def note(self, names: Iterable[str]) -> None:
        """Add tensors that passes write to; unknown names, as of modules made in a pass, are ignored."""
        self.written |= self._named.keys() & set(names)
        self.is_renewed = bool(self.written) or self.is_stateful

    def note_state(self) -> None:
        """Note that equal passes differ."""
        self.is_stateful = self.is_renewed = True

    def keep_parameters(self) -> None:
        """Keep copies of more parameters: the model reads its data, so that its writes cannot be foreseen."""
        self.is_foreseen = False
        self._may_copy = self._chosen(_MOST_COPIED_BYTES)
        self.versions = []

    def share(self) -> None:
        """Note that the caller's process uses the same memory, and may train there while passes run.

        What has changed without being foreseen is then the caller's doing, unless it is put back by a copy.
        """
        self.is_shared = True
        if self.is_foreseen:
            self._may_copy = self._chosen(0)

    def refresh(self) -> None:
        """Copy the tensors that have changed between passes, as a trainer's do.

        Where nothing else than a pass could change them, a training pass of another tree over the same memory
        did: they are put back, as far as there are copies.
        """
        if self.is_fixed and self.versions:
            self._put_back(self._copies.keys())
        for each in self._watched:
            version = each.tensor._version
            if each.name in self._may_copy and self._copied_at.get(each.name) != version:
                with torch.inference_mode(mode=False):
                    self._copies[each.name] = each.tensor.detach().clone()
                self._copied_at[each.name] = version
        self._mark()

    def put_back(self) -> frozenset[str]:
        """Put the watched tensors back after a pass.

        Returns:
            The names of those that it wrote to and that were not known for it.
        """
        known = self.written
        self.note(self._put_back(self._named.keys()))
        self._mark()
        return self.written - known

    def _put_back(self, names: Collection[str]) -> set[str]:
        """Put the named tensors back, and return the names of those that have changed."""
        changed = set()
        for each, version, address in zip(self._watched, self.versions, self.addresses, strict=True):
            if each.name not in names:
                continue
            if self.is_shared and each.name not in self._copies:
                continue
            is_moved, is_written = each.tensor.data_ptr() != address, each.tensor._version != version
            if is_moved:
                each.tensor.data = each.alias
            if is_written:
                self._restore(each)
            if is_moved or is_written:
                changed.add(each.name)
        return changed

    def _mark(self) -> None:
        self.versions = [tensor._version for tensor in self.tensors]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]

    def _restore(self, each: _Watched) -> None:
        copy = self._copies.get(each.name)
        if copy is None:
            self.refusal = (
                f"a pass has written to its '{each.name}', of which there is no copy; load the model again, "
                "or change its forward so that it leaves that as it is"
            )
            return
        if each.tensor.requires_grad and not each.tensor.is_leaf:
            each.tensor.detach_()
        with torch.no_grad():
            each.tensor.copy_(copy)
        self._copied_at[each.name] = each.tensor._version

    def _owned(self) -> list[Tensor]:
        return [self._named[name] for name in self.written]

    def _chosen(self, most_parameter_bytes: int) -> frozenset[str]:
        """Choose the tensors to copy: buffers as far as the limit allows, parameters all or none."""
        parameters = [each for each in self._watched if isinstance(each.tensor, nn.Parameter)]
        byte_count = sum(each.tensor.nbytes for each in parameters)
        if byte_count > most_parameter_bytes or not self._copies_parameters:
            parameters = []
        idle = {id(tensor) for tensor in _idle_buffers(self.module)}
        names, room = {each.name for each in parameters}, _MOST_COPIED_BYTES
        for each in self._watched:
            if isinstance(each.tensor, nn.Parameter) or id(each.tensor) in idle or each.tensor.nbytes > room:
                continue
            names.add(each.name)
            room -= each.tensor.nbytes
        return frozenset(names)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _watched(named: Mapping[str, Tensor]) -> list[_Watched]:
    """Return the tensors that can be compared, each once: others have no version or no address."""
    first = {id(tensor): (name, tensor) for name, tensor in reversed(list(named.items()))}
    kept = [pair for pair in reversed(list(first.values())) if _is_comparable(pair[1])]
    return [_Watched(name, tensor, tensor.detach()) for name, tensor in kept]


def _is_comparable(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_inference()


def _idle_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of torch's norms in eval mode, which only read them."""
    for part in module.modules():
        if isinstance(part, _NormBase) and not part.training:
            yield from part.buffers(recurse=False)


def _always_written(module: nn.Module) -> Iterator[str]:
    """Yield the names of statistics of norms in train mode, which no version tells of (torch 2.14)."""
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _NormBase) and part.training:
            yield from (f"{path}.{name}" if path else name for name, _ in part.named_buffers(recurse=False))
    for name, tensor in _named(module):
        if tensor.is_inference():  # made so by its factory: it has no version
            yield name
