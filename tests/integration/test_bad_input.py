"""Bad input gets a clear error of its own class; the server answers afterwards and nothing is left behind."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.footprint import hook_counts, live_tensor_count
from tests.support.odd_models import OnlyNegative, TellsPaths
from tests.support.oracle import noise
from tests.support.pictures import encoded, jpeg_bomb, photo, png_bomb, webp_bomb
from tests.support.running_server import RunningServer, running_server
from tests.support.serving import Serve, custom
from tests.support.tiny_models import Count, Plain, Structured
from tests.support.wire import EXTRACT, chunk, raw_channel, request, send, tensor
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tensor_pb2

IMAGES = noise(2, 3, 8, 8)
PHOTO_BYTES = encoded(photo(), "PNG")
LIMITS = {"max_request_bytes": 1 << 20, "max_reply_bytes": 1 << 16, "max_batch": 16, "max_taps": 8}
TEXT_FILE = b"Once upon a midnight dreary, while I pondered, weak and weary"


@pytest.fixture(scope="module")
def small_server() -> Iterator[RunningServer]:
    """A server with narrow limits."""
    models: dict[str, Any] = {
        "plain": custom(Plain, (3, 8, 8)),
        "structured": custom(Structured),
        "counts": custom(Count),
        "resnet18": {"weights": "random:0"},
        "sleeping": custom(Plain, (3, 8, 8)),
    }
    with running_server(models=models, device="cpu", limits=LIMITS) as running:
        running.run(lambda: running.engine.unload("sleeping"))
        yield running


@pytest.fixture(scope="module")
def healthy(small_server: RunningServer) -> Iterator[trocar.Client]:
    """A client that has made one good call, so that whatever is kept for later is there."""
    with trocar.connect(small_server.address) as connected:
        connected.extract("plain", IMAGES, taps="fc")
        yield connected


@pytest.fixture(autouse=True)
def unharmed(small_server: RunningServer, healthy: trocar.Client) -> Iterator[None]:
    """Whatever a test does: the next call is answered as before, no hook and no lease is left."""
    expected = healthy.extract("plain", IMAGES, taps="fc")["fc"]
    hooks = hook_counts(small_server)
    yield
    assert np.array_equal(healthy.extract("plain", IMAGES, taps="fc")["fc"], expected)
    assert hook_counts(small_server) == hooks


Extract = Callable[[trocar.Client], object]

CASES: dict[str, tuple[type[trocar.TrocarError], str, Extract]] = {
    "unknown model": (
        trocar.UnknownModelError,
        "nearest: resnet18",
        lambda c: c.extract("resnet81", IMAGES, taps="fc"),
    ),
    "a path as model": (
        trocar.UnknownModelError,
        "no model",
        lambda c: c.extract("../../etc/passwd", IMAGES, taps="fc"),
    ),
    "model not loaded": (
        trocar.ModelNotLoadedError,
        "load",
        lambda c: c.extract("sleeping", IMAGES, taps="fc"),
    ),
    "unknown module": (
        trocar.UnknownModuleError,
        "nearest: conv",
        lambda c: c.extract("plain", IMAGES, taps="konv"),
    ),
    "glob of nothing": (
        trocar.UnknownModuleError,
        "trocar modules",
        lambda c: c.extract("plain", IMAGES, taps="x.**"),
    ),
    "module never called": (
        trocar.ModuleNotCalledError,
        "unused",
        lambda c: c.extract("plain", IMAGES, taps="unused"),
    ),
    "ambiguous call": (
        trocar.AmbiguousCallError,
        "relu@0",
        lambda c: c.extract("plain", IMAGES, taps="relu"),
    ),
    "call out of range": (
        trocar.CallOutOfRangeError,
        "last call",
        lambda c: c.extract("plain", IMAGES, taps="relu@7"),
    ),
    "unknown pick": (
        trocar.UnknownPickError,
        "there is conv",
        lambda c: c.extract("plain", IMAGES, taps="conv[0]"),
    ),
    "output is no tensor": (
        trocar.NotATensorError,
        "int",
        lambda c: c.extract("structured", IMAGES[:, 0, 0, :3], taps="count"),
    ),
    "model returns no tensor": (
        trocar.NotATensorError,
        "int",
        lambda c: c.extract("counts", noise(2, 3), taps="/out"),
    ),
    "selector without sense": (
        trocar.InvalidSelectorError,
        "character 5",
        lambda c: c.extract("plain", IMAGES, taps="conv["),
    ),
    "no taps": (trocar.InvalidArgumentError, "taps", lambda c: c.extract("plain", IMAGES, taps=[])),
    "too many taps": (
        trocar.InvalidArgumentError,
        "1 to 8",
        lambda c: c.extract("plain", IMAGES, taps=["fc"] * 9),
    ),
    "one name twice": (
        trocar.DuplicateNameError,
        "alias",
        lambda c: c.extract("plain", IMAGES, taps=["conv", trocar.tap("fc", alias="conv")]),
    ),
    "alias of several values": (
        trocar.InvalidArgumentError,
        "stands for 2",
        lambda c: c.extract("plain", IMAGES, taps=trocar.tap("relu@*", alias="r")),
    ),
    "wrong rank": (
        trocar.InputRejectedError,
        "(batch, 3, 8, 8)",
        lambda c: c.extract("plain", IMAGES[0, 0], taps="fc"),
    ),
    "wrong channels": (
        trocar.InputRejectedError,
        "(batch, 3, 8, 8)",
        lambda c: c.extract("plain", IMAGES[:, :2], taps="fc"),
    ),
    "wrong size": (
        trocar.InputRejectedError,
        "",
        lambda c: c.extract("resnet18", noise(1, 3, 0, 5), taps="fc"),
    ),
    "float64": (
        trocar.InputRejectedError,
        'astype("float32")',
        lambda c: c.extract("plain", IMAGES.astype(np.float64), taps="fc"),
    ),
    "integers": (
        trocar.InputRejectedError,
        "",
        lambda c: c.extract("plain", IMAGES.astype(np.int64), taps="fc"),
    ),
    "too many arguments": (
        trocar.InputRejectedError,
        "",
        lambda c: c.extract("plain", (IMAGES, IMAGES), taps="fc"),
    ),
    "unknown keyword": (
        trocar.InputRejectedError,
        "zzz",
        lambda c: c.extract("plain", {"x": IMAGES, "zzz": IMAGES}, taps="fc"),
    ),
    "reserved keyword": (
        trocar.InputRejectedError,
        "",
        lambda c: c.extract("plain", {"self": IMAGES}, taps="fc"),
    ),
    "missing argument": (
        trocar.InputRejectedError,
        "",
        lambda c: c.extract("structured", {"bias": noise(2, 3)}, taps="both"),
    ),
    "empty batch": (trocar.EmptyBatchError, "no sample", lambda c: c.extract("plain", IMAGES[:0], taps="fc")),
    "empty list": (trocar.EmptyBatchError, "", lambda c: c.extract("resnet18", [], taps="fc")),
    "batch too large": (
        trocar.RequestTooLargeError,
        "the limit is 16",
        lambda c: c.extract("plain", noise(17, 3, 8, 8), taps="fc"),
    ),
    "request too large": (
        trocar.RequestTooLargeError,
        "1,048,576",
        lambda c: c.extract("plain", noise(1, 3, 512, 512), taps="fc"),
    ),
    "reply too large": (
        trocar.ReplyTooLargeError,
        "'conv'",
        lambda c: c.extract("plain", noise(1, 3, 128, 128), taps=["conv", "fc"]),
    ),
    "text as image": (
        trocar.InvalidImageError,
        "image 0",
        lambda c: c.extract("resnet18", TEXT_FILE, taps="fc"),
    ),
    "no bytes as image": (trocar.InvalidImageError, "", lambda c: c.extract("resnet18", b"", taps="fc")),
    "cut image": (
        trocar.InvalidImageError,
        "image 1",
        lambda c: c.extract("resnet18", [PHOTO_BYTES, PHOTO_BYTES[:2000]], taps="fc"),
    ),
    "gif": (
        trocar.InvalidImageError,
        "PNG",
        lambda c: c.extract("resnet18", b"GIF89a" + bytes(100), taps="fc"),
    ),
    "images for a model of arrays": (
        trocar.NoPreprocessingError,
        "array",
        lambda c: c.extract("plain", PHOTO_BYTES, taps="fc"),
    ),
    "no channel dimension": (
        trocar.InvalidArgumentError,
        "",
        lambda c: c.extract(
            "plain", IMAGES, taps=trocar.tap("fc", stats=["mean"], over="channel", channel_dim=5)
        ),
    ),
    "chunks too small": (
        trocar.InvalidArgumentError,
        "4096",
        lambda c: c.extract("plain", IMAGES, taps="fc", chunk_bytes=1),
    ),
    "modules of inputs that do not fit": (
        trocar.InputRejectedError,
        "",
        lambda c: c.modules("plain", (1, 4, 8, 8)),
    ),
    "modules of an empty batch": (trocar.EmptyBatchError, "", lambda c: c.modules("plain", (0, 3, 8, 8))),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_answered_with_an_error_of_its_own(healthy: trocar.Client, case: str) -> None:
    kind, hint, extract = CASES[case]
    with pytest.raises(kind) as caught:
        extract(healthy)
    assert type(caught.value) is kind
    assert hint in str(caught.value)


def test_refused_calls_do_not_pile_up_in_memory(healthy: trocar.Client) -> None:
    """The last few may still be on their way out."""
    counts = []
    for _ in range(3):
        for kind, _, extract in CASES.values():
            with pytest.raises(kind):
                extract(healthy)
        counts.append(live_tensor_count())
    assert counts[2] <= counts[0] + 3


WIRE_CASES: dict[str, tuple[type[trocar.TrocarError], list[bytes | pb.ExtractRequest]]] = {
    "too few bytes": (trocar.InvalidTensorError, [request("structured", "both", chunks=[chunk(bytes(11))])]),
    "too many bytes": (trocar.InvalidTensorError, [request("structured", "both", chunks=[chunk(bytes(13))])]),
    "no bytes": (trocar.InvalidTensorError, [request("structured", "both", chunks=[])]),
    "another dtype": (
        trocar.InvalidTensorError,
        [request("structured", "both", inputs=[tensor((1, 3), tensor_pb2.DTYPE_FLOAT64)])],
    ),
    "a gap": (trocar.InvalidTensorError, [request("structured", "both", chunks=[chunk(bytes(8), offset=4)])]),
    "no dtype": (trocar.InvalidTensorError, [request("structured", "both", inputs=[tensor((1, 3), 0)])]),
    "negative size": (trocar.InvalidTensorError, [request("structured", "both", inputs=[tensor((1, -3))])]),
    "rank 9": (trocar.InvalidTensorError, [request("structured", "both", inputs=[tensor((1,) * 9)])]),
    "overflow": (
        trocar.RequestTooLargeError,
        [request("structured", "both", inputs=[tensor((2, 2**62, 2**62))])],
    ),
    "no message": (trocar.InvalidArgumentError, []),
    "an empty message": (trocar.InvalidArgumentError, [b""]),
    "no protobuf": (trocar.InvalidArgumentError, [b"\xff" * 40]),
    "protobuf of another kind": (trocar.InvalidArgumentError, [b"\x0a\x02\xff\xfe"]),
    "garbage after the head": (
        trocar.InvalidArgumentError,
        [request("structured", "both", chunks=[]), b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"],
    ),
}


@pytest.mark.parametrize("case", WIRE_CASES)
def test_a_request_that_contradicts_itself_is_refused(small_server: RunningServer, case: str) -> None:
    kind, messages = WIRE_CASES[case]
    with raw_channel(small_server.address) as channel, pytest.raises(kind) as caught:
        send(channel, *messages)
    assert type(caught.value) is kind


def test_a_message_over_the_limit_is_refused(small_server: RunningServer) -> None:
    message = request("structured", "both", chunks=[chunk(bytes(20 << 20))])
    with (
        raw_channel(small_server.address, max_send_message_length=-1) as channel,
        pytest.raises(trocar.RequestTooLargeError),
    ):
        send(channel, message)


def test_a_message_that_unpacks_to_more_than_the_limit_is_refused(small_server: RunningServer) -> None:
    message = request("structured", "both", chunks=[chunk(bytes(64 << 20))]).SerializeToString()
    with raw_channel(small_server.address, max_send_message_length=-1) as channel:
        method = channel.stream_stream(EXTRACT, None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(method(iter([message]), compression=grpc.Compression.Gzip, timeout=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


BOMBS = {
    f"{kind} {width} x {height}": make(width, height)
    for kind, make, sizes in (
        (
            "PNG",
            png_bomb,
            [(50_000, 50_000), (2**31 - 1, 1), (1, 2**31 - 1), (10_000, 5_001), (2**31 - 1, 2**31 - 1)],
        ),
        ("JPEG", jpeg_bomb, [(65_500, 65_500), (65_500, 800), (10_000, 5_001), (7_000, 7_000)]),
        ("WebP", webp_bomb, [(16_383, 16_383), (16_383, 3_100), (7_100, 7_100)]),
    )
    for width, height in sizes
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_image_bomb_is_refused(healthy: trocar.Client, bomb: str) -> None:
    with pytest.raises((trocar.ImageTooLargeError, trocar.InvalidImageError)):
        healthy.extract("resnet18", BOMBS[bomb], taps="fc")


def test_many_images_that_are_small_only_while_encoded_are_refused(healthy: trocar.Client) -> None:
    """16 of them, 6 KB each, are 192 MB of pixels under a request limit of 1 MiB; 4,096 would be 49 GB."""
    large = encoded(photo(1, 1).resize((2000, 2000)), "PNG", compress_level=9)
    assert len(large) * 16 < LIMITS["max_request_bytes"]
    with pytest.raises((trocar.ImageTooLargeError, trocar.RequestTooLargeError)):
        healthy.extract("resnet18", [large] * 16, taps="fc")


def test_a_png_text_bomb_is_refused_or_ignored(healthy: trocar.Client) -> None:
    data = encoded(photo(8, 8), "PNG")
    text = b"zTXtcomment\0\0" + zlib.compress(bytes(200 << 20), 9)
    body = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    with pytest.raises(trocar.InvalidImageError):
        healthy.extract("resnet18", data[:33] + body + data[33:], taps="fc")


def test_a_reply_whose_size_depends_on_the_data_does_not_pass_the_limit(serve: Serve) -> None:
    """The recording saw values in [0, 1) and none below zero; the real input has nothing else."""
    running = serve(models={"negative": custom(OnlyNegative)}, limits={"max_reply_bytes": 1 << 12})
    with trocar.connect(running.address) as connected, pytest.raises(trocar.ReplyTooLargeError):
        connected.extract("negative", -np.ones((50, 100), np.float32), taps="chosen")


def test_the_form_that_modules_are_listed_for_is_limited_as_inputs_are(serve: Serve) -> None:
    """A model that needs data is run on an input of that form, made up by the server."""
    running = serve(models={"negative": custom(OnlyNegative)}, limits={"max_request_bytes": 1 << 12})
    with trocar.connect(running.address) as connected, pytest.raises(trocar.RequestTooLargeError):
        connected.modules("negative", (64, 1024))


def test_an_error_of_the_model_names_no_path_of_the_machine(serve: Serve) -> None:
    running = serve(models={"m": custom(TellsPaths)})
    with trocar.connect(running.address) as connected, pytest.raises(trocar.InputRejectedError) as caught:
        connected.extract("m", noise(1, 7), taps="/out")
    assert "/home/operator" not in str(caught.value)
