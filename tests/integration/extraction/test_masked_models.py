"""Models that read their mask: no pass without data, and yet the same promises."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models import masked_models
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

KINDS: dict[str, Any] = {
    "all": masked_models.AsksWhetherAll,
    "longest": masked_models.CutsToLongest,
    "unpads": masked_models.Unpads,
    "not-full": masked_models.RefusesFull,
    "often": masked_models.CallsAsOften,
    "encoder": masked_models.Encoder,
    "forever": masked_models.WaitsForever,
}
TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {name: custom(kind, (5,)) for name, kind in KINDS.items()}
    with running_server(models=models, device="cpu") as running:
        yield running


def inputs(mask: Any = MASK, tokens: Any = TOKENS) -> dict[str, Any]:
    return {"tokens": tokens, "attention_mask": np.asarray(mask)}


def truth(model_id: str, path: str, mask: Any = MASK, tokens: Any = TOKENS) -> list[Any]:
    """Return what a module returns in plain PyTorch, by call."""
    model, found = rebuilt(KINDS[model_id]), []
    model.get_submodule(path).register_forward_hook(lambda m, a, out: found.append(out.detach().numpy()))
    with torch.inference_mode():
        model(torch.from_numpy(tokens), attention_mask=torch.from_numpy(np.asarray(mask)))
    return found


@pytest.mark.parametrize("model_id", ["all", "longest", "unpads", "not-full"])
@pytest.mark.parametrize("path", ["embed", "blocks.1.linear", "head"])
def test_a_mask_that_is_read_gives_what_plain_torch_gives(
    client: trocar.Client, model_id: str, path: str
) -> None:
    found = client.extract(model_id, inputs(), taps=[path])
    assert np.allclose(found[path], truth(model_id, path)[0], rtol=0, atol=1e-6)


def test_the_same_model_without_its_mask_is_still_planned_without_data(client: trocar.Client) -> None:
    assert client.plan("all", {"tokens": TOKENS}, taps=["head"]).is_symbolic


def test_a_plan_of_a_mask_says_that_it_holds_for_no_other_data(client: trocar.Client) -> None:
    plan = client.plan("longest", inputs(), taps=["blocks.0@0"])
    assert not plan.is_symbolic
    assert plan.feature_maps["blocks.0"].shape == (2, 5, masked_models.WIDTH)  # of a mask of ones
    assert client.extract("longest", inputs(), taps=["blocks.0@0"])["blocks.0"].shape[1] == 3


def test_a_form_is_recorded_on_data_once(server: RunningServer, client: trocar.Client) -> None:
    def recording() -> Any:
        deployment = server.engine.deployment("all")
        return {signature: found for signature, found in deployment.recordings.items() if len(signature) == 2}

    client.extract("all", inputs(), taps=["head@0"])
    first = recording()
    client.extract("all", inputs(1 - MASK), taps=["embed@0"])
    assert first
    assert all(recording()[signature] is found for signature, found in first.items())


def test_edits_and_gradients_work_behind_a_mask(client: trocar.Client) -> None:
    edited = client.extract("all", inputs(), taps=["head"], edits=[trocar.edit("blocks.1", "scale", 0.0)])
    model = rebuilt(KINDS["all"])
    assert np.allclose(edited["head"], np.broadcast_to(model.head.bias.detach().numpy(), (2, 3)))
    found = client.gradients("all", inputs(), of=trocar.logit(0, at="head"), at=["blocks.0"])
    kept: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model.blocks[0].register_forward_hook(keep)
    model(torch.from_numpy(TOKENS), attention_mask=torch.from_numpy(MASK))[:, 0].sum().backward()
    assert kept[0].grad is not None
    (value,) = found.values()
    assert np.allclose(value, kept[0].grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("selector", ["blocks.0@*", "blocks.0", "blocks.*"])
def test_calls_that_depend_on_data_are_those_of_the_data(client: trocar.Client, selector: str) -> None:
    for mask in (MASK, MASK * 0, np.eye(2, 5, dtype=np.int64)):
        expected = truth("often", "blocks.0", mask)
        if selector == "blocks.0" and len(expected) > 1:
            with pytest.raises(trocar.errors.AmbiguousCallError):
                client.extract("often", inputs(mask), taps=[selector])
            continue
        maps = client.extract("often", inputs(mask), taps=[selector])
        own = [name for name in maps.expansions[selector] if name.startswith("blocks.0")]
        assert len(own) == len(expected)
        assert all(np.array_equal(maps[name], value) for name, value in zip(own, expected, strict=True))


def test_the_last_call_is_the_last_on_the_callers_data(client: trocar.Client) -> None:
    maps = client.extract("often", inputs(), taps=["blocks.0@-1"])
    (name,) = maps.expansions["blocks.0@-1"]
    assert np.array_equal(maps[name], truth("often", "blocks.0")[-1])


def test_an_edit_of_every_call_is_made_at_each_of_the_callers_data(client: trocar.Client) -> None:
    maps = client.extract(
        "often", inputs(), taps=["blocks.0@-1"], edits=[trocar.edit("blocks.0@*", "scale", 0.5)]
    )
    model = rebuilt(KINDS["often"])
    model.blocks[0].register_forward_hook(lambda m, a, out: out * 0.5)
    kept: list[torch.Tensor] = []
    model.blocks[0].register_forward_hook(lambda m, a, out: kept.append(out))
    with torch.inference_mode():
        model(torch.from_numpy(TOKENS), torch.from_numpy(MASK))
    (name,) = maps.expansions["blocks.0@-1"]
    assert np.array_equal(maps[name], kept[-1].numpy())


def before_the_last(mask: Any) -> torch.Tensor:
    """Return what the call before the last of the first block gives."""
    return torch.from_numpy(truth("often", "blocks.0", mask)[-2])


@pytest.mark.parametrize("source", [None, "other"])
def test_the_value_that_a_swap_takes_is_of_the_call_of_its_own_data(
    client: trocar.Client, source: str | None
) -> None:
    for mask in (MASK, np.ones_like(MASK), np.eye(2, 5, dtype=np.int64)):
        swap = trocar.edit("blocks.1/in", "swap", source=source, at="blocks.0@-2")
        sources = {"other": inputs(mask)} if source else None
        own = MASK if source else mask
        maps = client.extract("often", inputs(own), taps=["head"], edits=[swap], sources=sources)
        model = rebuilt(KINDS["often"])
        value = before_the_last(mask)
        model.blocks[1].register_forward_pre_hook(lambda m, a, value=value: (value,))
        with torch.inference_mode():
            expected = model(torch.from_numpy(TOKENS), torch.from_numpy(own))
        assert np.array_equal(maps["head"], expected.numpy())


def test_a_penalty_is_of_the_call_of_its_own_data(client: trocar.Client) -> None:
    for mask in (MASK, np.ones_like(MASK)):
        penalty = trocar.gradient_penalty(trocar.value("head"), "blocks.0@-2")
        grads = client.gradients("often", inputs(mask), of=penalty, at=["head/param(weight)"])
        model, outputs = rebuilt(KINDS["often"]), list[torch.Tensor]()
        model.blocks[0].register_forward_hook(lambda m, a, out, to=outputs: to.append(out))
        total = model(torch.from_numpy(TOKENS), torch.from_numpy(mask)).sum()
        (gradient,) = torch.autograd.grad(total, outputs[-2])
        expected = gradient.flatten(1).norm(dim=1).square().mean()
        assert grads.objective == pytest.approx(float(expected), rel=1e-5)


def test_a_recording_that_does_not_end_ends_with_the_deadline(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.DeadlineExceededError):
        client.plan("forever", inputs(), taps=["head"], timeout_s=1.0)
    assert client.extract("all", inputs(), taps=["head"])["head"].shape == (2, 3)


def test_a_mask_of_a_shape_that_cannot_be_is_refused(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.InputRejectedError):
        client.extract("all", inputs(np.zeros((2, 7), np.int64)), taps=["head"])


def test_a_recording_on_data_stays_within_the_memory_of_a_pass() -> None:
    settings: dict[str, Any] = {"limits": {"max_pass_bytes": 1 << 16}}
    models = {"all": custom(masked_models.AsksWhetherAll, (5,))}
    server = running_server(models=models, device="cpu", **settings)
    with server as running, trocar.connect(running.address) as connected:
        assert connected.extract("all", inputs(), taps=["head"])["head"].shape == (2, 3)
        long = np.ones((8, 4096), np.int64)
        with pytest.raises(trocar.errors.PassTooLargeError):
            connected.extract("all", inputs(long, long), taps=["head"])


@pytest.mark.parametrize("path", ["embed", "encoder", "head"])
@pytest.mark.parametrize(
    "mask", [MASK, np.ones_like(MASK), MASK[:, ::-1]], ids=["padded", "full", "padded left"]
)
def test_an_encoder_with_nested_tensors_is_tapped_around_them(
    client: trocar.Client, path: str, mask: Any
) -> None:
    found = client.extract("encoder", inputs(mask), taps=[path])
    assert np.array_equal(found[path], truth("encoder", path, mask.copy())[0])


def test_an_edit_around_nested_tensors_is_that_of_a_hook(client: trocar.Client) -> None:
    found = client.extract("encoder", inputs(), taps=["head"], edits=[trocar.edit("embed", "scale", 0.5)])
    model = rebuilt(masked_models.Encoder)
    model.embed.register_forward_hook(lambda m, a, out: out * 0.5)
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS), attention_mask=torch.from_numpy(MASK))
    assert np.array_equal(found["head"], expected.numpy())


@pytest.mark.parametrize("path", ["encoder.layers.0", "encoder.layers.1/in", "encoder.layers.1.linear1"])
def test_a_nested_tensor_is_refused_as_one(client: trocar.Client, path: str) -> None:
    with pytest.raises(trocar.errors.NotATensorError, match=r"nested tensor in .*enable_nested_tensor=False"):
        client.extract("encoder", inputs(), taps=[path])
    assert client.extract("encoder", {"tokens": TOKENS}, taps=[path])[path].shape[:2] == (2, 5)


def test_gradients_beside_nested_tensors_are_those_of_plain_torch(client: trocar.Client) -> None:
    of = trocar.value("head", function="square", reduce="sum")
    found = client.gradients("encoder", inputs(), of=of, at=["embed/grad_out"])
    model = rebuilt(masked_models.Encoder).requires_grad_(False)
    embedded = model.embed(torch.from_numpy(TOKENS)).requires_grad_()
    model.embed.register_forward_hook(lambda m, a, out: embedded)
    model(torch.from_numpy(TOKENS), attention_mask=torch.from_numpy(MASK)).square().sum().backward()
    assert embedded.grad is not None
    assert np.array_equal(found["embed/grad_out"], embedded.grad.numpy())
