"""Inputs of modules, by the parameters of `forward`: torch's own hooks and `inspect` are the oracle."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5Model,
    WhisperConfig,
    WhisperModel,
)

import trocar_server
from trocar_server.errors import ServiceError
from trocar_server.surgery import (
    CallInput,
    EditSession,
    EditTarget,
    GradientPoint,
    GradientSession,
    StartSession,
    TapSession,
    Target,
    parse_selector,
    record_calls,
    resolve,
)
from trocar_server.surgery.ports import UNNAMED, CallPorts, Parameters, parameters_of
from trocar_server.surgery.structure import leaves
from trocar_server.tensors.edits import Edit, Skip
from trocar_server.tensors.edits.elementwise import Scale, Zero

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Attends(nn.Module):
    """Takes its keywords in another order than it names them."""

    def forward(
        self, states: Tensor, mask: Tensor | None = None, *, scale: Tensor, shift: float = 0.0
    ) -> Tensor:
        """Combine all of them."""
        states = states if mask is None else states * mask
        return states * scale + shift


class TakesAny(nn.Module):
    """Has a parameter, others by position, and others by name."""

    def forward(self, first: Tensor, *rest: Tensor, last: Tensor, **more: Tensor) -> Tensor:
        """Add all of them."""
        return first + sum(rest) + last + sum(more.values())


class TakesOnlyKeywords(nn.Module):
    """Names no parameter."""

    def forward(self, **given: Tensor) -> Tensor:
        """Add all of them."""
        return sum(given.values(), torch.zeros(()))


class TakesOnlyPositions(nn.Module):
    """Names no parameter, either."""

    def forward(self, *given: Tensor) -> Tensor:
        """Add all of them."""
        return sum(given, torch.zeros(()))


class TakesStructures(nn.Module):
    """Has a dictionary, and a tuple in it."""

    def forward(self, batch: Mapping[str, Any], levels: tuple[Tensor, ...] = ()) -> Tensor:
        """Add all of them."""
        total: Tensor = batch["image"] + batch["pair"][1] + sum(levels)
        return total


class TakesTuple(nn.Module):
    """Has a tuple in the first place."""

    def forward(self, levels: tuple[Tensor, ...], other: Tensor) -> Tensor:
        """Add all of them."""
        return levels[0] + levels[1] + other


class OnlyKeywordParameters(nn.Module):
    """Has no parameter by position."""

    def forward(self, *, states: Tensor, other: Tensor) -> Tensor:
        """Subtract."""
        return states - 2 * other


class Callers(nn.Module):
    """Calls every other module, by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.attends, self.any, self.keywords = Attends(), TakesAny(), TakesOnlyKeywords()
        self.positions, self.structures, self.only = (
            TakesOnlyPositions(),
            TakesStructures(),
            OnlyKeywordParameters(),
        )
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.one, self.tuple = TakesOnlyKeywords(), TakesTuple()

    def forward(self, x: Tensor) -> Tensor:
        """Run all of them."""
        y, z = x + 1, x + 2
        x = self.attends(scale=y, mask=z, states=x)
        x = x + self.any(x, y, z, extra=z + 1, last=y + 1)
        x = x + self.keywords(b=y, a=z) + self.one(states=x)
        x = x + self.positions(x, y)
        x = x + self.structures({"image": x, "pair": (y, z)}, levels=(z, y))
        x = x + self.only(other=y, states=x)
        x = x + self.tuple((x, y), z)
        attended: Tensor = self.attention(value=z, key=y, query=x, need_weights=False)[0]
        return x + attended


def whisper() -> tuple[nn.Module, Call]:
    config = WhisperConfig(
        vocab_size=20, num_mel_bins=4, d_model=8, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
        max_source_positions=5, max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    given = {
        "input_features": torch.rand(2, 4, 10),
        "decoder_input_ids": torch.tensor([[1, 5, 6], [1, 7, 8]]),
    }
    return WhisperModel(config), ((), given)


def ids(model: nn.Module, **more: Any) -> tuple[nn.Module, Call]:
    return model, ((), {"input_ids": torch.tensor([[3, 5, 6], [4, 7, 8]]), **more})


def llama() -> tuple[nn.Module, Call]:
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return ids(LlamaModel(config))


def bert() -> tuple[nn.Module, Call]:
    config = BertConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return ids(BertModel(config), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))


def t5() -> tuple[nn.Module, Call]:
    config = T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, use_cache=False
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return ids(T5Model(config), decoder_input_ids=torch.tensor([[0, 5], [0, 9]]))


def bart() -> tuple[nn.Module, Call]:
    config = BartConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
        max_position_embeddings=8, use_cache=False,
    )  # fmt: skip
    return ids(BartModel(config), decoder_input_ids=torch.tensor([[0, 5], [0, 9]]))


def decoder_layer() -> tuple[nn.Module, Call]:
    layer = nn.TransformerDecoderLayer(4, 2, 8, batch_first=True)
    return layer, ((), {"memory": torch.rand(2, 3, 4), "tgt": torch.rand(2, 5, 4)})


def callers() -> tuple[nn.Module, Call]:
    return Callers(), ((torch.rand(2, 3, 4),), {})


MODELS = [whisper, llama, bert, t5, bart, decoder_layer, callers]


def made(build: Callable[[], tuple[nn.Module, Call]]) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    model, call = build()
    return model.eval().requires_grad_(requires_grad=False), call


@contextmanager
def heard(model: nn.Module) -> Iterator[dict[tuple[str, int], dict[str, Any]]]:
    """Yield what each call gets, by the names that `inspect` gives them."""
    calls: dict[tuple[str, int], dict[str, Any]] = {}
    counts: dict[str, int] = {}
    handles = []

    def hear(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = counts.get(path, 0)
        counts[path] = index + 1
        calls[path, index] = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

    for path, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda module, args, kwargs, path=path: hear(path, module, args, kwargs), with_kwargs=True
            )
        )
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def targets(model: nn.Module, call: Call, *selectors: str) -> list[list[Target]]:
    recording = record_calls(model, *call, is_symbolic=False)
    found = resolve(map(parse_selector, selectors), recording)
    return [[target for target, _ in values] for values in found]


@pytest.mark.parametrize("build", MODELS)
def test_in_is_the_first_parameter_of_every_call(build: Callable[[], tuple[nn.Module, Call]]) -> None:
    model, call = made(build)
    (wanted,) = targets(model, call, "**/in")
    with heard(model) as calls, TapSession(model, wanted) as session:
        model(*call[0], **call[1])
    firsts = {
        (path, index): tensors(next(iter(given.values())))
        for (path, index), given in calls.items()
        if path
        and given
        and not isinstance(model.get_submodule(path), TakesOnlyKeywords | TakesOnlyPositions)
    }
    seen: dict[tuple[str, int], list[Tensor]] = {}
    for target in wanted:
        seen.setdefault((target.path, target.call), []).append(session.values[target.name])
    for place, expected in firsts.items():
        assert len(seen.get(place, [])) == len(expected), place
        assert all(map(torch.equal, seen.get(place, []), expected)), place


@pytest.mark.parametrize("build", MODELS)
def test_every_parameter_has_its_name_and_its_number(build: Callable[[], tuple[nn.Module, Call]]) -> None:
    model, call = made(build)
    with heard(model) as calls:
        model(*call[0], **call[1])
    checked = 0
    for (path, index), given in calls.items():
        names = [
            parameter.name
            for parameter in inspect.signature(model.get_submodule(path).forward).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        for place, name in enumerate(names):
            if not isinstance(given.get(name), Tensor):
                continue
            at = f"{path}@{index}" if path else ""
            numbered = [f"{at}/in[{place}]"] if name != "last" else []  # behind `*rest`
            found = targets(model, call, f"{at}/in({name})", *numbered)
            for (target,) in found:
                assert target.name == found[0][0].name
                with heard(model) as own, TapSession(model, [target]) as session:
                    model(*call[0], **call[1])
                assert torch.equal(session.values[target.name], own[path, index][name])
                checked += 1
    assert checked > 5


CALLED_BY_KEYWORD = [
    (whisper, "decoder.layers.0.encoder_attn"),
    (whisper, "decoder.layers.0.self_attn"),
    (llama, "layers.1"),
    (llama, "layers.1.self_attn"),
    (t5, "decoder.block.0.layer.1"),
    (t5, "decoder.block.0.layer.1.EncDecAttention"),
    (bart, "decoder.layers.0.encoder_attn"),
    (decoder_layer, "multihead_attn"),
    (callers, "attends"),
    (callers, "attention"),
    (callers, "only"),
]


@pytest.mark.parametrize(("build", "path"), CALLED_BY_KEYWORD)
def test_an_edit_of_in_changes_the_first_parameter_alone(
    build: Callable[[], tuple[nn.Module, Call]], path: str
) -> None:
    model, call = made(build)
    with heard(model) as plain:
        model(*call[0], **call[1])
    (wanted,) = targets(model, call, f"{path}/in")
    assert len(wanted) == 1
    with EditSession(model, [EditTarget(wanted[0], Edit(Zero()))]), heard(model) as edited:
        model(*call[0], **call[1])
    before, after = plain[path, 0], edited[path, 0]
    assert list(before) == list(after)
    first, *others = before
    assert not after[first].any()
    for name in others:
        assert all(map(torch.equal, tensors(before[name]), tensors(after[name]))), name


@pytest.mark.parametrize(("build", "path"), [(llama, "layers.1"), (callers, "attends"), (callers, "only")])
def test_skip_returns_the_first_parameter(build: Callable[[], tuple[nn.Module, Call]], path: str) -> None:
    model, call = made(build)
    recording = record_calls(model, *call, is_symbolic=False)
    ((target, _),) = resolve([parse_selector(path)], recording)[0]
    edit = Edit(Skip())
    taken = CallInput("in", (0,))
    with (
        EditSession(model, [EditTarget(target, edit, call_input=taken)]),
        heard(model) as given,
        TapSession(model, [target]) as session,
    ):
        model(*call[0], **call[1])
    assert torch.equal(session.values[target.name], next(iter(given[path, 0].values())))


@pytest.mark.parametrize(("build", "path"), CALLED_BY_KEYWORD)
def test_gradients_at_in_are_those_of_the_first_parameter(
    build: Callable[[], tuple[nn.Module, Call]], path: str
) -> None:
    model, call = made(build)
    (wanted,) = targets(model, call, f"{path}/grad_in")
    module, kept = model.get_submodule(path), []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        name = next(iter(bound.arguments))
        bound.arguments[name] = bound.arguments[name].detach().requires_grad_()
        kept.append(bound.arguments[name])
        return bound.args, bound.kwargs

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    output = model(*call[0], **call[1])
    tensors(output)[0].square().sum().backward()
    handle.remove()
    with torch.enable_grad(), GradientSession(model, [GradientPoint(target) for target in wanted]) as session:
        output = model(*call[0], **call[1])
        session.backward(tensors(output)[0].square().sum())
    assert len(session.values) == 1
    torch.testing.assert_close(session.values[wanted[0].name], kept[0].grad)


def test_a_pass_starts_at_a_keyword() -> None:
    model, call = made(callers)
    ((target,),) = targets(model, call, "only/in(states)")
    with TapSession(model, [target]) as session:
        model(*call[0], **call[1])
    value = session.values[target.name]
    ports = CallPorts(parameters_of(model.get_submodule("only")), (), {"other": 1, "states": 2})
    assert ports == {"in": {0: 2}, "in(other)": 1}
    with (
        pytest.raises(RuntimeError),
        StartSession(model, target, value) as start,
    ):  # `x +` needs what is before
        model(torch.rand(2, 3, 4, device="meta"))
    assert start.has_begun


def test_names_numbers_and_structures() -> None:
    model, call = made(callers)

    def names(selector: str) -> list[str]:
        return [target.name for target in targets(model, call, selector)[0]]

    assert names("any/in") == ["any/in"]
    assert names("any/in[1]") == ["any/in[1]"]
    assert names("any/in[2]") == ["any/in[2]"]
    assert names("any/in[-1]") == ["any/in(last)"]
    assert names("any/in(last)") == ["any/in(last)"]
    assert names("positions/in") == ["positions/in"]
    assert names("positions/in[1]") == ["positions/in[1]"]
    assert names("one/in") == ["one/in(states)"]
    assert names("structures/in") == [
        'structures/in["image"]',
        'structures/in["pair"][0]',
        'structures/in["pair"][1]',
    ]
    assert names('structures/in["pair"]') == ['structures/in["pair"][0]', 'structures/in["pair"][1]']
    assert names('structures/in(batch)["image"]') == ['structures/in["image"]']
    assert names('structures/in[0]["image"]') == ['structures/in["image"]']
    assert names("structures/in[1]") == ["structures/in(levels)[0]", "structures/in(levels)[1]"]
    assert names("structures/in(levels)[-1]") == ["structures/in(levels)[1]"]
    assert names("tuple/in") == ["tuple/in[0][0]", "tuple/in[0][1]"]
    assert names("tuple/in[0][1]") == ["tuple/in[0][1]"]
    assert names("tuple/in(levels)[1]") == ["tuple/in[0][1]"]
    assert names("tuple/in[1]") == ["tuple/in(other)"]
    assert names("attends/in[1]") == ["attends/in(mask)"]
    assert names("attends/in[2]") == ["attends/in(scale)"]


@pytest.mark.parametrize(
    ("selector", "hint"),
    [
        ("keywords/in", "available: keywords/in(b), keywords/in(a)"),
        ("attends/in[3]", "available: attends/in, attends/in(mask), attends/in(scale)"),
        ("attends/in(shift)", "no input 'shift'"),
        ("attends/in[-4]", "no input [-4]"),
        ("tuple/in[2]", "tuple/in[0][0], tuple/in[0][1], tuple/in(other)"),
    ],
)
def test_what_is_not_there_is_answered_with_the_new_spelling(selector: str, hint: str) -> None:
    model, call = made(callers)
    with pytest.raises(ServiceError) as problem:
        targets(model, call, selector)
    assert hint in problem.value.message


def test_a_first_parameter_that_is_not_given_is_answered_with_what_is() -> None:
    model, (_, given) = made(bert)
    embeddings = torch.rand(2, 3, 8)
    mask = {"attention_mask": given["attention_mask"], "inputs_embeds": embeddings}
    for more, reason in (({}, "gets no value for 'input_ids'"), ({"input_ids": None}, "NoneType")):
        with pytest.raises(ServiceError) as problem:
            targets(model, ((), {**mask, **more}), "/in")
        assert reason in problem.value.message
        assert "/in(inputs_embeds)" in problem.value.message


def test_parameters_without_names() -> None:
    def shown(function: Callable[..., Any]) -> Parameters:
        module = nn.Module()
        module.forward = function  # an instance's own
        return parameters_of(module)

    def of_position(first: Any, /, second: Any, **more: Any) -> None: ...

    assert shown(torch.relu) == UNNAMED
    ports = CallPorts(shown(of_position), (1, 2), {"first": 3})
    assert ports == {"in": {0: 1}, "in(second)": 2, "in(first)": 3}
    assert ports.arguments() == ((1, 2), {"first": 3})


def test_compiled_traced_and_wrapped_modules_have_the_names_of_their_own() -> None:
    names = ("states", "mask", "scale", "shift")
    compiled: Any = torch.compile(Attends())
    assert parameters_of(Attends()).names == names
    assert parameters_of(compiled).names == names
    assert parameters_of(torch.fx.symbolic_trace(TakesTuple())).names == ("levels", "other")


def test_a_wildcard_edit_scales_first_parameters_only() -> None:
    """Llama's blocks get position embeddings by keyword."""
    model, call = made(llama)
    (wanted,) = targets(model, call, "layers.*/in")
    assert [target.name for target in wanted] == ["layers.0/in", "layers.1/in"]
    edits = [EditTarget(target, Edit(Scale(2.0))) for target in wanted]

    def double(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return (args[0] * 2, *args[1:]), kwargs

    layers = [model.get_submodule(f"layers.{index}") for index in range(2)]
    handles = [layer.register_forward_pre_hook(double, with_kwargs=True) for layer in layers]
    expected = model(*call[0], **call[1]).last_hidden_state
    for handle in handles:
        handle.remove()
    with EditSession(model, edits):
        assert torch.equal(model(*call[0], **call[1]).last_hidden_state, expected)


def test_inputs_get_their_ports_in_one_place() -> None:
    """A second copy of the rule would call inputs by how they are passed."""
    root = Path(trocar_server.__file__).parent
    writes_a_port = re.compile(r"""f["']in\(\{""")
    files = [path for path in root.rglob("*.py") if writes_a_port.search(path.read_text())]
    assert [path.relative_to(root).as_posix() for path in files] == ["surgery/ports.py"]
