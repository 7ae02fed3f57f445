"""Many batches in one call: in order, bounded, a bad one alone, and on through broken connections."""

import io
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.proxy import running_proxy
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom

SHAPE = (2, 3, 8, 8)
WAIT_S = 15.0


def batches(count: int, first: int = 0) -> Iterator[Array]:
    return (noise(*SHAPE, seed=index) for index in range(first, count))


def solo(client: trocar.Client, index: int) -> Array:
    return client.extract("plain", noise(*SHAPE, seed=index), taps="fc")["fc"]


def test_results_come_in_order_and_equal_single_calls(client: trocar.Client) -> None:
    with client.extract_stream("plain", batches(12), taps="fc") as stream:
        results = list(stream)
    assert [result.index for result in results] == list(range(12))
    for result in results:
        assert np.array_equal(result.unwrap()["fc"], solo(client, result.index))


async def test_the_asyncio_client_gives_the_same(server: RunningServer, client: trocar.Client) -> None:
    async def later() -> AsyncIterator[Array]:
        for batch in batches(5):
            yield batch

    async with trocar.aio.connect(server.address) as aio:
        for source in (batches(5), later()):
            async with aio.extract_stream("plain", source, taps="fc") as stream:
                found = [result.unwrap()["fc"] async for result in stream]
            assert all(np.array_equal(values, solo(client, index)) for index, values in enumerate(found))


def test_a_batch_that_fails_does_so_alone(client: trocar.Client) -> None:
    bad: list[Any] = [
        noise(1, 4, 8, 8),
        "no-such-file.jpg",
        b"no image",
        noise(0, 3, 8, 8),
        {"y": noise(*SHAPE)},
        object(),
        np.zeros(SHAPE, np.float16),
    ]
    inputs = [batch for wrong in bad for batch in (wrong, noise(*SHAPE, seed=9))]
    with client.extract_stream("plain", inputs, taps="fc") as stream:
        results = list(stream)
    assert [type(result.error) for result in results[::2]] == [
        trocar.errors.InputRejectedError,
        FileNotFoundError,
        trocar.errors.NoPreprocessingError,
        trocar.errors.EmptyBatchError,
        trocar.errors.InputRejectedError,
        TypeError,
        trocar.errors.InputRejectedError,
    ]
    expected = solo(client, 9)
    assert all(np.array_equal(result.unwrap()["fc"], expected) for result in results[1::2])
    with pytest.raises(trocar.errors.InputRejectedError):
        results[0].unwrap()


def bad_png() -> Image.Image:
    """Return an image whose pixels Pillow cannot read: it raises a SyntaxError."""
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    data = file.getvalue()
    at = data.rindex(b"IDAT")  # not the first one
    return Image.open(io.BytesIO(data[:at] + b"\0\1\2\3" + data[at + 4 :]))


UNSENDABLE = [[], {}, np.zeros((0, 8, 8, 3), np.uint8), bad_png]


@pytest.mark.parametrize("bad", UNSENDABLE)
async def test_a_batch_that_cannot_be_sent_fails_alone(
    server: RunningServer, client: trocar.Client, bad: Any
) -> None:
    inputs = [noise(*SHAPE, seed=9), bad() if callable(bad) else bad, noise(*SHAPE, seed=9)]
    with client.extract_stream("plain", inputs, taps="fc") as stream:
        found = list(stream)
    async with (
        trocar.aio.connect(server.address) as aio,
        aio.extract_stream("plain", inputs, taps="fc") as later,
    ):
        awaited = [result async for result in later]
    for results in (found, awaited):
        assert [result.error is None for result in results] == [True, False, True]
        assert isinstance(results[1].error, SyntaxError if callable(bad) else trocar.errors.EmptyBatchError)


def test_what_is_wrong_with_the_taps_ends_the_stream_before_any_batch(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError, match="nearest"):
        list(client.extract_stream("plain", batches(3), taps="conv3"))


def test_an_error_of_the_callers_own_iterator_comes_after_the_results_before_it(
    client: trocar.Client,
) -> None:
    def failing() -> Iterator[Array]:
        yield from batches(3)
        raise KeyError("mine")

    stream = client.extract_stream("plain", failing(), taps="fc")
    assert [next(stream).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="mine"):
        next(stream)


@pytest.mark.parametrize("window", [1, 3])
def test_no_more_batches_are_taken_than_the_window_has_room_for(client: trocar.Client, window: int) -> None:
    taken = 0

    def counted() -> Iterator[Array]:
        nonlocal taken
        for batch in batches(30):
            taken += 1
            yield batch

    with client.extract_stream("plain", counted(), taps="fc", window=window) as stream:
        for result in stream:
            assert taken <= result.index + 1 + window


def test_a_stream_that_is_left_early_leaves_nothing_behind(
    server: RunningServer, client: trocar.Client
) -> None:
    before = hook_counts(server)
    with client.extract_stream("plain", batches(1000), taps="fc") as stream:
        assert next(stream).index == 0
    with pytest.raises(StopIteration):
        next(stream)
    client.extract("plain", noise(*SHAPE), taps="fc")
    assert hook_counts(server) == before


def test_a_stream_without_batches_has_no_results(client: trocar.Client) -> None:
    assert list(client.extract_stream("plain", [], taps="fc")) == []


def test_a_stream_goes_on_through_broken_connections(server: RunningServer, client: trocar.Client) -> None:
    chance = random.Random(3)
    with (
        running_proxy(server.address) as proxy,
        trocar.connect(proxy.address) as far,
        far.extract_stream("plain", batches(200), taps=["fc", "conv"]) as stream,
    ):
        count = 0
        for result in stream:
            assert result.index == count
            assert np.array_equal(result.unwrap()["fc"], solo(client, count))
            count += 1
            if chance.random() < 0.1:
                proxy.break_connections()
        assert count == 200
        assert proxy.connection_count > 10


async def test_an_asyncio_stream_goes_on_through_broken_connections(
    server: RunningServer, client: trocar.Client
) -> None:
    with running_proxy(server.address) as proxy:
        async with (
            trocar.aio.connect(proxy.address) as far,
            far.extract_stream("plain", batches(60), taps="fc") as stream,
        ):
            count = 0
            async for result in stream:
                assert np.array_equal(result.unwrap()["fc"], solo(client, count))
                count += 1
                if count % 15 == 0:
                    proxy.break_connections()
        assert count == 60
        assert proxy.connection_count > 3


def test_a_server_that_stays_away_ends_the_stream(server: RunningServer) -> None:
    with running_proxy(server.address) as proxy, trocar.connect(proxy.address, retries=1) as far:
        stream = far.extract_stream("plain", batches(5000), taps="fc")
        next(stream)
        proxy.refuse()
        with pytest.raises(trocar.errors.ServerUnavailableError):
            list(stream)


def test_a_stream_can_begin_at_a_later_batch(client: trocar.Client) -> None:
    results = list(client.extract_stream("plain", batches(8, first=5), taps="fc", first_batch=5))
    assert [result.index for result in results] == [5, 6, 7]
    assert np.array_equal(results[0].unwrap()["fc"], solo(client, 5))


def test_large_batches_cross_in_many_chunks(client: trocar.Client) -> None:
    large = [noise(64, 3, 160, 160, seed=seed) for seed in range(2)]  # 19 MB each
    results = list(client.extract_stream("plain", large, taps="conv"))
    for batch, result in zip(large, results, strict=True):
        assert np.array_equal(result.unwrap()["conv"], client.extract("plain", batch, taps="conv")["conv"])


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("first_batch", -1)])
def test_an_option_out_of_range_is_refused_at_once(client: trocar.Client, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        client.extract_stream("plain", [], taps="fc", **{name: value})


def tight(total_bytes: int) -> dict[str, Any]:
    """Limits that let one caller reserve so many bytes."""
    return {"max_principal_bytes": total_bytes, "max_pending_bytes": 4 * total_bytes}


def test_a_batch_that_never_fits_beside_its_decoded_images_is_refused(serve: Serve) -> None:
    """An image of 3.1 MB takes 6.9 MB more, decoded and prepared: either alone would fit."""
    image = np.zeros((1, 1024, 1024, 3), np.uint8)
    server = serve(models={"resnet18": {"weights": "random:0"}}, limits=tight(8_000_000))
    with trocar.connect(server.address, retries=0) as own:
        with own.extract_stream(
            "resnet18", [image], taps="fc", options=trocar.options(timeout_s=WAIT_S)
        ) as stream:
            (refused,) = stream
        with own.extract_stream("resnet18", [image[:, ::4, ::4]], taps="fc") as stream:
            (taken,) = stream
    assert isinstance(refused.error, trocar.errors.RequestTooLargeError)
    assert "bytes together" in str(refused.error)
    assert taken.error is None


def test_a_batch_that_never_fits_beside_the_streams_tensors_is_refused(serve: Serve) -> None:
    rows = np.ones((50, 1000, 3), np.float32)
    edit = trocar.edit("identity", "add", rows)
    server = serve(models={"identity": custom(Identity)}, limits=tight(rows.nbytes * 3 // 2))
    tap = trocar.tap("identity", stats=["max"], values=False)
    with trocar.connect(server.address, retries=0) as own, ThreadPoolExecutor(1) as background:
        stream = own.extract_stream("identity", [rows, rows[:1]], taps=tap, edits=edit)
        try:
            refused = background.submit(next, stream).result(WAIT_S)
        finally:
            own.close()
    assert isinstance(refused.error, trocar.errors.RequestTooLargeError)
    assert "bytes together" in str(refused.error)


def pictures(count: int) -> list[Array]:
    """Batches of one image: 3.1 MB each, and 6.9 MB more while it is decoded."""
    images = [noise(1, 3, 1024, 1024, seed=i)[0].transpose(1, 2, 0)[None] for i in range(count)]
    return [np.clip(image * 64 + 128, 0, 255).astype(np.uint8) for image in images]


def test_batches_that_fit_one_at_a_time_come_through(serve: Serve) -> None:
    pixels = pictures(4)
    server = serve(models={"resnet18": {"weights": "random:0"}}, limits=tight(11_000_000))
    with trocar.connect(server.address, retries=0) as own:
        with own.extract_stream(
            "resnet18", pixels, taps="fc", options=trocar.options(timeout_s=WAIT_S)
        ) as stream:
            found = [result.unwrap()["fc"] for result in stream]
        for image, values in zip(pixels, found, strict=True):
            assert np.array_equal(values, own.extract("resnet18", image, taps="fc")["fc"])


@pytest.mark.parametrize(("caller_count", "pending_bytes"), [(1, 44_000_000), (2, 15_000_000)])
def test_streams_that_wait_for_each_others_memory_come_through(
    serve: Serve, caller_count: int, pending_bytes: int
) -> None:
    """Each has received a batch, and beside these none can be decoded."""
    limits = {"max_principal_bytes": 11_000_000, "max_pending_bytes": pending_bytes}
    server = serve(models={"resnet18": {"weights": "random:0"}}, limits=limits)
    pixels = pictures(4)
    with ExitStack() as stack, ThreadPoolExecutor(3) as background:
        # With retries: a stream that begins while the others hold all memory is told to come again.
        callers = [stack.enter_context(trocar.connect(server.address)) for _ in range(caller_count)]

        def run(number: int) -> list[Array]:
            client = callers[number % caller_count]
            with client.extract_stream(
                "resnet18", pixels, taps="fc", options=trocar.options(timeout_s=WAIT_S)
            ) as stream:
                return [result.unwrap()["fc"] for result in stream]

        first, *others = background.map(run, range(3))
        alone = [callers[0].extract("resnet18", image, taps="fc")["fc"] for image in pixels]
    assert all(np.array_equal(found, alone) for found in (first, *others))
    assert server.engine.admission.reserved() == (0, 0.0, 0)
    assert not server.engine.admission.overdrafts
