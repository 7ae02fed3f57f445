"""Small models with habits that are rare, legal and easy to get wrong."""

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn


class _Nested(nn.Module):
    """Calls itself."""

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return (self(x, depth - 1) if depth else x) + 1


class Recursive(nn.Module):
    """One module whose second and third call happen inside its first."""

    def __init__(self) -> None:
        super().__init__()
        self.nested = _Nested()

    def forward(self, x: torch.Tensor) -> Any:
        return self.nested(x, 2)


class _Doubles(nn.Module):
    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails:
            raise ValueError("not this time")
        return x * 2


class CatchesErrors(nn.Module):
    """The first call of `step` raises, and the model goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.step = _Doubles()

    def forward(self, x: torch.Tensor) -> Any:
        try:
            x = self.step(x, True)
        except ValueError:
            x = x + 1
        return self.step(self.step(x, False), False)


class KeepsState(nn.Module):
    """Returns a buffer that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.total, torch.Tensor)
        return self.total.add_(x.sum(0))


class OddKeys(nn.Module):
    """Returns dicts whose keys are no plain words."""

    def __init__(self) -> None:
        super().__init__()
        self.negative = Returns({-1: 1.0, 1: 2.0})
        self.truth = Returns({True: 1.0, False: 2.0})
        self.lookalikes = Returns({1: 1.0, "1": 2.0})
        self.quoted = Returns({'a"]b': 1.0, "line\nbreak": 2.0, "schön": 3.0, "": 4.0})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.negative, self.truth, self.lookalikes, self.quoted):
            module(x)
        return x + 1


class Returns(nn.Module):
    """Returns a structure with its input plus every number of it."""

    def __init__(self, offsets: Any) -> None:
        super().__init__()
        self.offsets = offsets

    def forward(self, x: torch.Tensor) -> Any:
        if isinstance(self.offsets, dict):
            return {key: x + offset for key, offset in self.offsets.items()}
        return self.offsets


@dataclass(slots=True)
class SlottedPair:
    """A dataclass without a `__dict__`."""

    first: torch.Tensor
    second: torch.Tensor


class Slotted(nn.Module):
    """Returns a dataclass with slots."""

    def forward(self, x: torch.Tensor) -> SlottedPair:
        return SlottedPair(x + 1, x + 2)


class _Loop:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.myself = self


class Cyclic(nn.Module):
    """Returns an object that refers to itself."""

    def forward(self, x: torch.Tensor) -> _Loop:
        return _Loop(x + 1)


class Nothing(nn.Module):
    """Modules that return empty structures or None."""

    def __init__(self) -> None:
        super().__init__()
        self.tuple = Returns(())
        self.dict = Returns({})
        self.none = Returns(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.tuple, self.dict, self.none):
            module(x)
        return x + 1


class Overwrites(nn.Module):
    """Every way to write into a value after a hook has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Identity() for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        values = [way(x + 1) for way in self.ways]
        values[0].neg_()
        values[1].detach().neg_()
        values[2].view(-1)[::2].fill_(7)
        torch.neg(values[3], out=values[3])
        values[4].data.neg_()
        values[5][0] = 9
        return sum(values[1:], values[0])


class WritesThroughNumpy(nn.Module):
    """Writes where torch cannot count it; runs on real data only."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        value = self.value(x + 1)
        value.numpy()[:] = 0
        return value


class InPlaceOnInput(nn.Module):
    """Overwrites the model's own input."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.identity(x)
        return x.mul_(2)


class Identity(nn.Module):
    """Returns its input itself, through a module that does so, too."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.identity(x)


class Dtypes(nn.Module):
    """One output of every kind that the wire has or has not."""

    NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = {name: (x * 3).to(getattr(torch, name)) for name in self.NAMES}
        spectrum = torch.fft.fft(x)
        return {
            **outputs,
            "bfloat16": x.to(torch.bfloat16),
            "complex64": spectrum,
            "complex128": spectrum.to(torch.complex128),
            "conjugated": spectrum.conj(),
            "negated": spectrum.conj().imag,
            "transposed": x.t(),
            "strided": x[:, ::2],
            "expanded": x[:, :1].expand(-1, 5),
            "scalar": x.sum(),
            "empty": x[:, :0],
        }


class Unsendable(nn.Module):
    """Tensors that the wire has no form for."""

    def __init__(self) -> None:
        super().__init__()
        self.uint16 = nn.Identity()
        self.float8 = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.uint16(x.to(torch.uint16))
        self.float8(x.to(torch.float8_e4m3fn))
        return x + 1


class Sparse(nn.Module):
    """A module with a sparse output."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.sparse(x.to_sparse()).to_dense()


class OnlyNegative(nn.Module):
    """Calls `late` for negative input only; `chosen` returns the negative elements."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = nn.Identity()
        self.late = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.chosen(x[x < 0])
        return self.late(x) if x.sum().item() < 0 else x + 1


class OddNames(nn.Module):
    """Children whose names torch allows and a selector has other plans for."""

    NAMES = (
        "plain",
        "plain/in",
        "with space",
        "a:b",
        "call@1",
        "q[0]",
        "*",
        "schön",
        "out",
        "in",
        "-1",
        "#3",
    )

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Identity() for name in self.NAMES})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts.values()):
            part(x + number)
        return x


class TellsPaths(nn.Module):
    """Fails with a path of the machine in its error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] == 7:
            raise RuntimeError("cannot open /home/operator/secret/weights.bin")
        return x + 1


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ReLU()
        self.second = self.first

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x) - 1)


class Deep(nn.Module):
    """A ReLU under several containers, beside a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.stem(x), x


class TokenModel(nn.Module):
    """Takes whole numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.embedding(tokens)


class TakesMany(nn.Module):
    """Positional, optional and keyword-only arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(3, 3, 2)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None, *, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(x, x if y is None else y)
        return mixed if scale is None else mixed * scale


class Transformer(nn.Module):
    """torch's own encoder, whose fast path looks at hooks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encoder(x))


class FailsLate(nn.Module):
    """Makes a large value and fails; `alive` has the large values that somebody still holds."""

    alive: ClassVar["weakref.WeakSet[torch.Tensor]"] = weakref.WeakSet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta or x.shape[0] == 1:
            return x + 1
        large = x.new_zeros(1 << 20)
        FailsLate.alive.add(large)
        raise RuntimeError("too late")


class TorchLayers(nn.Module):
    """Layers of torch that keep weights, hooks or state in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.parametrized: Any = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.lstm = nn.LSTM(6, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(12, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5, inplace=True)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.parametrized.parametrizations.weight.original1
        self.list = nn.ModuleList([nn.SiLU(inplace=True), nn.Hardswish(inplace=True)])

    def forward(self, x: torch.Tensor) -> Any:
        x = self.spectral(self.parametrized(x))
        x, _ = self.gru(self.lstm(x)[0])
        x, weights = self.attention(x, x, x)
        x = self.dropout(self.norm(x))
        for layer in self.list:
            x = layer(x)
        return {"values": self.tied(x), "weights": weights}


class Grows(nn.Module):
    """Makes a child in its first pass."""

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Identity()
        return self.late(x)


class Moody(nn.Module):
    """Returns and passes on more for positive input than for other."""

    def __init__(self) -> None:
        super().__init__()
        self.split = Both()

    def forward(self, x: torch.Tensor) -> Any:
        if x.sum().item() > 0:
            return {"always": self.split(x, other=x), "sometimes": x + 1}
        return {"always": self.split(x)}


class Both(nn.Module):
    """Takes one tensor or two."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        return x if other is None else x + other
