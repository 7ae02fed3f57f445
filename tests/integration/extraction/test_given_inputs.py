"""What a user may pass, through a real server: torch in this process is the reference for every bit."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trocar
from tests.support.models.tiny_models import HalfPrecision, Plain, Words
from tests.support.oracles.oracle import hooked_outputs, noise, rebuilt_by_name, same_bits
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, rebuilt

SSD = "ssdlite320_mobilenet_v3_large"
SIZES = [noise(3, 40, 60), noise(3, 64, 48, seed=1), noise(3, 40, 41, seed=2)]
PATHS = ["backbone.features.0.0.0", "head.classification_head.module_list.0.1", ""]


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models: dict[str, Any] = {name: {"weights": "random:0"} for name in (SSD, "resnet18")}
    models["plain"] = custom(Plain, (3, 8, 8))
    models["half"] = custom(HalfPrecision, (3,))
    models["words"] = custom(Words, (3,))
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def by_torch(arrays: list[Any]) -> dict[str, torch.Tensor]:
    """Run the detector on the list in this process."""
    model = rebuilt_by_name(SSD)
    wrapped = _Listed(model)
    found = hooked_outputs(wrapped, arrays, [f"model.{path}".rstrip(".") for path in PATHS])
    return {
        f"{path.removeprefix('model').removeprefix('.')}{pick}": value
        for (path, _, pick), value in found.items()
    }


class _Listed(nn.Module):
    """Takes the samples of a list as arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *samples: torch.Tensor) -> Any:
        return self.model(list(samples))


GIVEN: dict[str, Callable[[list[Any]], Any]] = {
    "arrays": list,
    "tensors": lambda arrays: [torch.from_numpy(array) for array in arrays],
    "both": lambda arrays: [torch.from_numpy(arrays[0]), *arrays[1:]],
}


@pytest.mark.parametrize("form", GIVEN)
def test_a_detector_takes_arrays_of_different_sizes(client: trocar.Client, form: str) -> None:
    expected = by_torch(SIZES)
    maps = client.extract(SSD, GIVEN[form](SIZES), taps=[path or "/out" for path in PATHS])
    found = {f"{info.path}{info.pick}": maps[name] for name, info in maps.info.items()}
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not same_bits(found[name], value)] == []


def test_a_detectors_plan_stream_and_gradients_take_them_too(client: trocar.Client) -> None:
    whole = client.extract(SSD, SIZES, taps=PATHS[0])[PATHS[0]]
    assert client.plan(SSD, SIZES, taps=PATHS[0]).feature_maps[PATHS[0]].shape == whole.shape
    with client.extract_stream(SSD, [SIZES, SIZES[:2]], PATHS[0]) as stream:
        first, second = (result.unwrap()[PATHS[0]] for result in stream)
    assert np.array_equal(first, whole)
    assert len(second) == 2
    found = client.gradients(SSD, SIZES, of=trocar.value(PATHS[0]), at=["/in"])
    samples = [torch.from_numpy(array.copy()).requires_grad_() for array in SIZES]
    model, kept = rebuilt_by_name(SSD), []
    model.get_submodule(PATHS[0]).register_forward_hook(
        lambda module, args, output: kept.append(output.clone())
    )
    model(list(samples))
    kept[0].sum().backward()
    for value, sample in zip(found.values(), samples, strict=True):
        assert sample.grad is not None
        assert same_bits(value, sample.grad)


@pytest.mark.parametrize("model_id", ["resnet18", "plain"])
def test_a_model_of_one_batch_refuses_them_in_the_users_words(client: trocar.Client, model_id: str) -> None:
    message = r"shapes \(3, 40, 60\) and \(3, 64, 48\) and 1 more, .*takes one batch; .*`np.stack\(arrays\)`"
    for call in (client.extract, client.plan):
        with pytest.raises(trocar.errors.InputRejectedError, match=message):
            call(model_id, SIZES, taps="fc")
    with pytest.raises(trocar.errors.InputRejectedError, match="takes one batch"):
        client.gradients(model_id, SIZES, of=trocar.logit(0), at="/in")
    with (
        client.extract_stream(model_id, [SIZES], "fc") as stream,
        pytest.raises(trocar.errors.InputRejectedError),
    ):
        next(iter(stream)).unwrap()


def test_a_trainer_refuses_them_in_the_users_words(client: trocar.Client) -> None:
    with client.train("plain", optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        with pytest.raises(trocar.errors.InputRejectedError, match=r"np\.stack"):
            trainer.step(SIZES, [0, 1, 2])
        with pytest.raises(trocar.errors.InputRejectedError, match=r'array\.astype\("float32"\)'):
            trainer.step(noise(2, 3, 8, 8).astype(np.float64), [0, 1])


@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_float32_becomes_what_a_model_of_16_bits_computes_in(client: trocar.Client, wire: Any) -> None:
    values = noise(4, 3)
    given = torch.from_numpy(values)
    sent = given if wire is None else given.to(getattr(torch, wire)).float()
    with torch.inference_mode():
        expected = rebuilt(HalfPrecision)(sent.bfloat16()).float()
    assert (
        same_bits(
            client.extract("half", values, taps="/out", options=trocar.options(wire=wire))["/out"], expected
        )
        or wire
    )
    assert same_bits(
        client.extract("half", given.bfloat16(), taps="/out")["/out"],
        rebuilt(HalfPrecision)(given.bfloat16()).detach().float(),
    )
    assert same_bits(client.extract("half", values, taps="/in")["/in"], given.bfloat16().float())


def test_float64_is_refused_with_a_line_that_numpy_knows(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.InputRejectedError, match=r'array\.astype\("float32"\)'):
        client.extract("half", noise(4, 3).astype(np.float64), taps="/out")


ODD: dict[str, tuple[str, Any, str]] = {
    "uint8, channels first": (
        "resnet18",
        np.zeros((2, 3, 64, 64), np.uint8),
        r"`array\.transpose\(0, 2, 3, 1\)`",
    ),
    "one of these": ("resnet18", np.zeros((3, 64, 64), np.uint8), r"`array\.transpose\(1, 2, 0\)`"),
    "uint8 without preprocessing": (
        "plain",
        np.zeros((2, 3, 8, 8), np.uint8),
        r'`array\.astype\("float32"\) / 255`',
    ),
    "floats, channels last": (
        "resnet18",
        np.zeros((2, 64, 64, 3), np.float32),
        r"`array\.transpose\(0, 3, 1, 2\)`",
    ),
    "one sample": ("plain", noise(3, 8, 8), r"`array\[np\.newaxis\]`"),
    "one, channels last": (
        "plain",
        np.zeros((8, 8, 3), np.float32),
        r"`array\.transpose\(2, 0, 1\)\[np\.newaxis\]`",
    ),
    "int64": ("resnet18", np.zeros((2, 3, 64, 64), np.int64), r'`array\.astype\("float32"\)`'),
    "int64, custom": ("plain", np.zeros((2, 3, 8, 8), np.int64), r'`array\.astype\("float32"\)`'),
    "bool": ("resnet18", np.zeros((2, 3, 64, 64), bool), r'`array\.astype\("float32"\)`'),
    "complex": ("resnet18", np.zeros((2, 3, 64, 64), np.complex64), r'`array\.real\.astype\("float32"\)`'),
    "float64": ("resnet18", np.zeros((2, 3, 64, 64)), r'`array\.astype\("float32"\)`'),
    "floats as words": ("words", np.zeros((2, 3), np.float32), r'`array\.astype\("int64"\)`'),
    "uint8 of a detector": (
        SSD,
        [np.zeros((3, 40, 60), np.uint8), np.zeros((3, 50, 60), np.uint8)],
        r"transpose\(1, 2, 0\)",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_an_array_of_another_form_is_refused_with_the_line_that_mends_it(
    client: trocar.Client, case: str
) -> None:
    model_id, given, line = ODD[case]
    with pytest.raises(trocar.errors.InputRejectedError, match=line):
        client.extract(model_id, given, taps="/out")
    with client.extract_stream(model_id, [given], "/out") as stream:
        error = next(iter(stream)).error
    assert isinstance(error, trocar.errors.InputRejectedError)


@pytest.mark.parametrize(
    "case", [case for case, entry in ODD.items() if entry[0] != "words" and "detector" not in case]
)
def test_the_line_mends_it(client: trocar.Client, case: str) -> None:
    model_id, given, line = ODD[case]
    code = line.replace("\\", "").strip("`")
    mended = eval(code, {"array": given, "np": np})
    mended = mended.astype(np.float32) if mended.dtype == np.float64 else mended
    assert client.extract(model_id, mended, taps="/out")["/out"].size


REFUSED: dict[str, tuple[Any, str]] = {
    "masked": (np.ma.MaskedArray(noise(2, 3, 8, 8)), r"array\.filled\(0\)"),
    "objects": (np.array([noise(3, 8, 8), noise(3, 8, 9), None], dtype=object), "Python objects"),
    "text": (np.array(["a.jpg", "b.jpg"]), r"array\.tolist\(\)"),
    "dates": (np.zeros(3, "M8[s]"), "astype"),
    "fields": (np.zeros(3, [("a", "f4")]), "fields"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_way_in_refuses_what_is_no_tensor(client: trocar.Client, kind: str) -> None:
    given, message = REFUSED[kind]
    for call in (
        lambda: client.extract("plain", given, taps="fc"),
        lambda: client.extract("plain", {"x": given}, taps="fc"),
        lambda: client.plan("plain", given, taps="fc"),
        lambda: client.gradients("plain", given, of=trocar.logit(0), at="/in"),
        lambda: client.attribute("plain", given, "saliency"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with client.extract_stream("plain", [given], "fc") as stream, pytest.raises(TypeError, match=message):
        next(iter(stream)).unwrap()
    with (
        client.train("plain", optimizer=trocar.training.sgd(lr=0.1)) as trainer,
        pytest.raises(TypeError, match=message),
    ):
        trainer.step(given, [0, 1])


def test_a_server_in_this_process_takes_and_refuses_the_same() -> None:
    with trocar.connect(
        "local",
        models={
            "plain": {
                "factory": "tests.support.models.tiny_models:Plain",
                "input_shape": (3, 8, 8),
                "weights": "random:0",
            }
        },
    ) as local:
        with pytest.raises(trocar.errors.InputRejectedError, match=r"np\.stack"):
            local.extract("plain", SIZES, taps="fc")
        with pytest.raises(TypeError, match=r"array\.filled"):
            local.extract("plain", REFUSED["masked"][0], taps="fc")
