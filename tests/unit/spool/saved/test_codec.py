"""Codecs: pairs of pack and unpack of the user's, against torch's own hooks with the same functions."""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.unit.spool.steps import are_equal, batch, files, open_spool, small_model, wait_until_written
from trocar_server.spool import Codec, CodecError, SavedTensorChangedError, Spool

MIN_BYTES = 1024


class Identity:
    """Keeps the tensor itself."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed


class Halves:
    """A cast, with what is no tensor beside it."""

    def pack(self, tensor: torch.Tensor) -> Any:
        return tensor.half(), {"dtype": tensor.dtype}

    def unpack(self, packed: Any) -> torch.Tensor:
        halves, remark = packed
        restored: torch.Tensor = halves.to(remark["dtype"])
        return restored


class Sparse:
    """Values that are not zero, with their places, in a tuple within a tuple."""

    def pack(self, tensor: torch.Tensor) -> Any:
        flat = tensor.flatten()
        places = flat.nonzero().squeeze(1)
        return (places.int(), flat[places]), tensor.shape

    def unpack(self, packed: Any) -> torch.Tensor:
        (places, values), shape = packed
        dense = torch.zeros(shape.numel(), dtype=values.dtype)
        dense[places.long()] = values
        return dense.reshape(shape)


class Quantised:
    """Eight bits for each element, with a scale that is a small tensor."""

    def pack(self, tensor: torch.Tensor) -> Any:
        scale = tensor.abs().max() / 127 + 1e-12
        return (tensor / scale).round().to(torch.int8), scale

    def unpack(self, packed: Any) -> torch.Tensor:
        steps, scale = packed
        restored: torch.Tensor = steps * scale
        return restored


class Encrypted:
    """Bytes that nobody reads without the key. For a test: not a cipher."""

    def __init__(self) -> None:
        self.pack_count = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        self.pack_count += 1
        plain = tensor.contiguous().flatten().view(torch.uint8)
        return plain ^ self._key(plain.numel()), tensor.dtype, tensor.shape

    def unpack(self, packed: Any) -> torch.Tensor:
        secret, dtype, shape = packed
        restored: torch.Tensor = (secret ^ self._key(secret.numel())).view(dtype).reshape(shape)
        return restored

    def _key(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


CODECS: list[Callable[[], Codec]] = [Identity, Halves, Sparse, Quantised, Encrypted]
LOSSLESS: list[Callable[[], Codec]] = [Identity, Sparse, Encrypted]


def torchs_hooks(codec: Codec) -> saved_tensors_hooks:
    """The oracle: the codec in torch's own hooks, for the tensors that a spool may write."""

    def pack(tensor: torch.Tensor) -> Any:
        base = tensor if tensor._base is None else tensor._base
        is_taken = not (base.is_leaf and base.requires_grad) and tensor.nbytes >= MIN_BYTES
        return (True, codec.pack(tensor.detach())) if is_taken else (False, tensor)

    return saved_tensors_hooks(pack, lambda packed: codec.unpack(packed[1]) if packed[0] else packed[1])


def gradients(model: nn.Module, context: Any, is_checkpointed: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    with context:
        made = checkpoint(model, batch(), use_reentrant=False) if is_checkpointed else model(batch())
        loss = made.square().sum()
    loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.fixture(params=[0, 1 << 30], ids=["on disk", "in memory"])
def budget_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("make", CODECS)
def test_gradients_are_those_of_torchs_hooks(
    tmp_path: Path, make: Callable[[], Codec], budget_bytes: int
) -> None:
    model = small_model()
    expected = gradients(model, torchs_hooks(make()))
    with open_spool(tmp_path, budget_bytes, codec=make()) as spool:
        for _ in range(2):
            assert are_equal(gradients(model, spool), expected)
        assert (spool.report().written_bytes > 0) is (budget_bytes == 0)


@pytest.mark.parametrize("make", LOSSLESS)
def test_a_codec_without_loss_changes_no_gradient(tmp_path: Path, make: Callable[[], Codec]) -> None:
    model = small_model()
    expected = gradients(model, nullcontext())
    with open_spool(tmp_path, codec=make(), checksum=True) as spool:
        assert are_equal(gradients(model, spool), expected)


def test_on_disk_is_what_the_codec_made(tmp_path: Path) -> None:
    x = torch.randn(4000, requires_grad=True)
    with open_spool(tmp_path, codec=Encrypted()) as spool:
        with spool:
            made = x * 2
            loss = made.pow(3).sum()
        wait_until_written(spool)
        plain = made.detach().numpy().tobytes()[:64]
        assert files(tmp_path)
        assert all(plain not in path.read_bytes() for path in files(tmp_path))
        loss.backward()


def test_what_several_operations_save_is_packed_once(tmp_path: Path) -> None:
    codec, x = Encrypted(), torch.randn(4000, requires_grad=True)
    with open_spool(tmp_path, codec=codec) as spool:
        with spool:
            made = x * 2
            loss = made.pow(3).sum() + made.sin().sum()
            part = made[1000:].pow(2).sum()  # another view: packed on its own
        assert codec.pack_count == 2
        (loss + part).backward()
        assert x.grad is not None
        again = x * 2
        oracle = again.pow(3).sum() + again.sin().sum() + again[1000:].pow(2).sum()
        assert torch.equal(x.grad, torch.autograd.grad(oracle, x)[0])


def test_parameters_kept_tensors_and_small_ones_are_not_packed(tmp_path: Path) -> None:
    codec, kept = Encrypted(), torch.randn(4000)
    weight = nn.Parameter(torch.randn(4000))
    with open_spool(tmp_path, codec=codec, keep=[kept]) as spool, spool:
        (weight * kept).sum().backward()
        (weight[:10] * torch.randn(10)).sum().backward()
    assert codec.pack_count == 0


@pytest.mark.parametrize("store_dtype", ["bf16", "int8"])
def test_lossy_dtypes_come_behind_a_codec(tmp_path: Path, store_dtype: str) -> None:
    model = small_model()
    exact = gradients(model, nullcontext())
    with open_spool(tmp_path, codec=Encrypted(), store_dtype=store_dtype) as spool:
        assert are_equal(gradients(model, spool), exact)  # bytes have nothing to lose
        assert spool.report().lossy_bytes == 0
    with open_spool(tmp_path, codec=Identity(), store_dtype=store_dtype, keep=[model]) as spool:
        assert not are_equal(gradients(model, spool), exact)
        assert spool.report().lossy_bytes > 0


@pytest.mark.parametrize("make", CODECS)
def test_a_change_in_place_raises(tmp_path: Path, make: Callable[[], Codec], budget_bytes: int) -> None:
    x = torch.randn(4000, requires_grad=True)
    with open_spool(tmp_path, budget_bytes, codec=make()) as spool:
        with spool:
            made = x * 2
            loss = made.pow(3).sum()
        with torch.no_grad():
            made.add_(1)
        with pytest.raises(SavedTensorChangedError, match="at version 1; expected version 0"):
            loss.backward()


class Scratch(Identity):
    """Returns the same memory each time."""

    def __init__(self) -> None:
        self._memory = torch.empty(4000)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._memory.copy_(tensor)


class Changing(Identity):
    """Changes what it is given."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(1).clone()


@pytest.mark.parametrize("make", [Scratch, Changing])
def test_a_codec_that_changes_what_is_saved_raises(
    tmp_path: Path, make: Callable[[], Codec], budget_bytes: int
) -> None:
    x = torch.randn(4000, requires_grad=True)
    with open_spool(tmp_path, budget_bytes, codec=make()) as spool:

        def step() -> None:
            with spool:
                loss = (x * 2).sin().cos().sum()
            loss.backward()

        with pytest.raises(RuntimeError, match=r"inplace|in place"):  # torch sees the second itself
            step()


@pytest.mark.parametrize("make", CODECS)
def test_where_changes_are_allowed(tmp_path: Path, make: Callable[[], Codec], budget_bytes: int) -> None:
    def step(context: Any) -> torch.Tensor:
        x = torch.linspace(-1, 1, 4000).requires_grad_()
        with allow_mutation_on_saved_tensors() if context is spool else nullcontext():
            with context:
                made = x * 2
                loss = made.pow(3).sum()
            if context is spool:
                with torch.no_grad():
                    made.mul_(-7)
            loss.backward()
        assert x.grad is not None
        return x.grad

    with open_spool(tmp_path, budget_bytes, codec=make()) as spool:
        assert torch.equal(step(spool), step(torchs_hooks(make())))


class Failing(Identity):
    """Raises in one of the two."""

    def __init__(self, is_late: bool) -> None:
        self._is_late = is_late

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_late:
            raise KeyError("no key")
        return tensor.clone()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        raise KeyError("no key")


@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_of_the_codec_fails_the_step_and_leaks_nothing(tmp_path: Path, is_late: bool) -> None:
    model = small_model()
    with open_spool(tmp_path, codec=Failing(is_late)) as spool:
        for _ in range(3):
            with pytest.raises(KeyError, match="no key"):
                gradients(model, spool)
        gc.collect()
        wait_until_written(spool)
        spool.report()
        assert spool.store.ledger.is_empty
        assert spool.store.ledger.memory_bytes == 0
        assert not spool.packer.coded


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda tensor: [tensor], "returned list; autograd saved a tensor of torch.float32, shape .4000."),
        (lambda tensor: tensor.double(), "returned a tensor of torch.float64"),
        (lambda tensor: tensor[:10], r"shape \[10\], on cpu; autograd saved .* shape \[4000\], on cpu"),
    ],
)
def test_something_else_than_was_saved_is_refused(
    tmp_path: Path, returned: Callable[[torch.Tensor], Any], message: str
) -> None:
    class Wrong(Identity):
        def unpack(self, packed: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = returned(packed)
            return found

    x = torch.randn(4000, requires_grad=True)
    with open_spool(tmp_path, codec=Wrong()) as spool:
        with spool:
            loss = (x * 2).pow(3).sum()
        with pytest.raises(CodecError, match=message):
            loss.backward()


def test_something_without_both_methods_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="codec needs the methods pack and unpack; int has none of them"):
        Spool(tmp_path, 0, codec=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", CODECS)
def test_checkpointing_within(tmp_path: Path, make: Callable[[], Codec]) -> None:
    model = small_model()
    expected = gradients(model, torchs_hooks(make()), is_checkpointed=True)
    with open_spool(tmp_path, codec=make()) as spool:
        assert are_equal(gradients(model, spool, is_checkpointed=True), expected)


def test_save_on_cpu_within_and_around(tmp_path: Path) -> None:
    codec, model = Encrypted(), small_model()
    expected = gradients(model, nullcontext())
    with open_spool(tmp_path, codec=codec) as spool:
        with spool:
            assert are_equal(gradients(model, save_on_cpu()), expected)
        assert codec.pack_count == 0
        with save_on_cpu():
            assert are_equal(gradients(model, spool), expected)
        assert codec.pack_count > 0


def test_backward_twice_and_through_backward(tmp_path: Path) -> None:
    x = torch.randn(4000, dtype=torch.float64, requires_grad=True)

    def chain() -> torch.Tensor:
        return (x * 2).sin().pow(3).sum()

    def second(loss: torch.Tensor) -> Iterator[torch.Tensor]:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        yield from torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        yield from torch.autograd.grad(first.sum(), x)

    with open_spool(tmp_path, codec=Encrypted()) as spool:
        with spool:
            found = list(second(chain()))
        assert all(map(torch.equal, found, second(chain())))
