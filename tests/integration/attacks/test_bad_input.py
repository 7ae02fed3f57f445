"""Bad input gets a clear error of its own class; the server answers afterwards and nothing is left behind."""

from collections.abc import Callable

import numpy as np
import pytest

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import live_tensor_count
from tests.support.servers.running_server import RunningServer
from tests.support.wire.pictures import encoded, photo
from tests.support.wire.wire import chunk, raw_channel, request, send, tensor
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tensor_pb2

IMAGES = noise(2, 3, 8, 8)
PHOTO_BYTES = encoded(photo(), "PNG")
TEXT_FILE = b"Once upon a midnight dreary, while I pondered, weak and weary"


pytestmark = pytest.mark.usefixtures("unharmed")

Extract = Callable[[trocar.Client], object]

CASES: dict[str, tuple[type[trocar.TrocarError], str, Extract]] = {
    "unknown model": (
        trocar.errors.UnknownModelError,
        "nearest: resnet18",
        lambda c: c.extract("resnet81", IMAGES, taps="fc"),
    ),
    "a path as model": (
        trocar.errors.UnknownModelError,
        "no model",
        lambda c: c.extract("../../etc/passwd", IMAGES, taps="fc"),
    ),
    "model not loaded": (
        trocar.errors.ModelNotLoadedError,
        "load",
        lambda c: c.extract("sleeping", IMAGES, taps="fc"),
    ),
    "unknown module": (
        trocar.errors.UnknownModuleError,
        "nearest: conv",
        lambda c: c.extract("plain", IMAGES, taps="konv"),
    ),
    "glob of nothing": (
        trocar.errors.UnknownModuleError,
        "trocar modules",
        lambda c: c.extract("plain", IMAGES, taps="x.**"),
    ),
    "module never called": (
        trocar.errors.ModuleNotCalledError,
        "unused",
        lambda c: c.extract("plain", IMAGES, taps="unused"),
    ),
    "ambiguous call": (
        trocar.errors.AmbiguousCallError,
        "relu@0",
        lambda c: c.extract("plain", IMAGES, taps="relu"),
    ),
    "call out of range": (
        trocar.errors.CallOutOfRangeError,
        "last call",
        lambda c: c.extract("plain", IMAGES, taps="relu@7"),
    ),
    "unknown pick": (
        trocar.errors.UnknownPickError,
        "available: conv",
        lambda c: c.extract("plain", IMAGES, taps="conv[0]"),
    ),
    "output is not a tensor": (
        trocar.errors.NotATensorError,
        "int",
        lambda c: c.extract("structured", IMAGES[:, 0, 0, :3], taps="count"),
    ),
    "model returns no tensor": (
        trocar.errors.NotATensorError,
        "int",
        lambda c: c.extract("counts", noise(2, 3), taps="/out"),
    ),
    "selector without sense": (
        trocar.errors.InvalidSelectorError,
        "character 6",
        lambda c: c.extract("plain", IMAGES, taps="conv["),
    ),
    "no taps": (trocar.errors.InvalidArgumentError, "taps", lambda c: c.extract("plain", IMAGES, taps=[])),
    "too many taps": (
        trocar.errors.InvalidArgumentError,
        "1 to 8",
        lambda c: c.extract("plain", IMAGES, taps=["fc"] * 9),
    ),
    "one name twice": (
        trocar.errors.DuplicateNameError,
        "alias",
        lambda c: c.extract("plain", IMAGES, taps=["conv", trocar.tap("fc", alias="conv")]),
    ),
    "alias of several values": (
        trocar.errors.InvalidArgumentError,
        "stands for 2",
        lambda c: c.extract("plain", IMAGES, taps=trocar.tap("relu@*", alias="r")),
    ),
    "wrong rank": (
        trocar.errors.InputRejectedError,
        "(batch, 3, 8, 8)",
        lambda c: c.extract("plain", IMAGES[0, 0], taps="fc"),
    ),
    "wrong channels": (
        trocar.errors.InputRejectedError,
        "(batch, 3, 8, 8)",
        lambda c: c.extract("plain", IMAGES[:, :2], taps="fc"),
    ),
    "wrong size": (
        trocar.errors.InputRejectedError,
        "",
        lambda c: c.extract("resnet18", noise(1, 3, 0, 5), taps="fc"),
    ),
    "float64": (
        trocar.errors.InputRejectedError,
        'astype("float32")',
        lambda c: c.extract("plain", IMAGES.astype(np.float64), taps="fc"),
    ),
    "integers": (
        trocar.errors.InputRejectedError,
        "",
        lambda c: c.extract("plain", IMAGES.astype(np.int64), taps="fc"),
    ),
    "too many arguments": (
        trocar.errors.InputRejectedError,
        "",
        lambda c: c.extract("plain", (IMAGES, IMAGES), taps="fc"),
    ),
    "unknown keyword": (
        trocar.errors.InputRejectedError,
        "zzz",
        lambda c: c.extract("plain", {"x": IMAGES, "zzz": IMAGES}, taps="fc"),
    ),
    "reserved keyword": (
        trocar.errors.InputRejectedError,
        "",
        lambda c: c.extract("plain", {"self": IMAGES}, taps="fc"),
    ),
    "missing argument": (
        trocar.errors.InputRejectedError,
        "",
        lambda c: c.extract("structured", {"bias": noise(2, 3)}, taps="both"),
    ),
    "empty batch": (
        trocar.errors.EmptyBatchError,
        "at least one sample",
        lambda c: c.extract("plain", IMAGES[:0], taps="fc"),
    ),
    "empty list": (trocar.errors.EmptyBatchError, "", lambda c: c.extract("resnet18", [], taps="fc")),
    "batch too large": (
        trocar.errors.RequestTooLargeError,
        "the limit is 16",
        lambda c: c.extract("plain", noise(17, 3, 8, 8), taps="fc"),
    ),
    "request too large": (
        trocar.errors.RequestTooLargeError,
        "1,048,576",
        lambda c: c.extract("plain", noise(1, 3, 512, 512), taps="fc"),
    ),
    "reply too large": (
        trocar.errors.ReplyTooLargeError,
        "'conv'",
        lambda c: c.extract("plain", noise(1, 3, 128, 128), taps=["conv", "fc"]),
    ),
    "text as image": (
        trocar.errors.InvalidImageError,
        "image 0",
        lambda c: c.extract("resnet18", TEXT_FILE, taps="fc"),
    ),
    "no bytes as image": (
        trocar.errors.InvalidImageError,
        "",
        lambda c: c.extract("resnet18", b"", taps="fc"),
    ),
    "cut image": (
        trocar.errors.InvalidImageError,
        "image 1",
        lambda c: c.extract("resnet18", [PHOTO_BYTES, PHOTO_BYTES[:2000]], taps="fc"),
    ),
    "gif": (
        trocar.errors.InvalidImageError,
        "PNG",
        lambda c: c.extract("resnet18", b"GIF89a" + bytes(100), taps="fc"),
    ),
    "images for a model of arrays": (
        trocar.errors.NoPreprocessingError,
        "array",
        lambda c: c.extract("plain", PHOTO_BYTES, taps="fc"),
    ),
    "no channel dimension": (
        trocar.errors.InvalidArgumentError,
        "",
        lambda c: c.extract(
            "plain", IMAGES, taps=trocar.tap("fc", stats=["mean"], over="channel", channel_dim=5)
        ),
    ),
    "chunks too small": (
        trocar.errors.InvalidArgumentError,
        "4096",
        lambda c: c.extract("plain", IMAGES, taps="fc", options=trocar.options(chunk_bytes=1)),
    ),
    "modules of inputs that do not fit": (
        trocar.errors.InputRejectedError,
        "",
        lambda c: c.modules("plain", (1, 4, 8, 8)),
    ),
    "modules of an empty batch": (
        trocar.errors.EmptyBatchError,
        "",
        lambda c: c.modules("plain", (0, 3, 8, 8)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_answered_with_an_error_of_its_own(healthy: trocar.Client, case: str) -> None:
    kind, hint, extract = CASES[case]
    with pytest.raises(kind) as caught:
        extract(healthy)
    assert type(caught.value) is kind
    assert hint in str(caught.value)


def test_refused_calls_do_not_pile_up_in_memory(healthy: trocar.Client) -> None:
    """The last few may still be on their way out; 80 are made between the two counts."""
    counts = []
    for _ in range(3):
        for kind, _, extract in CASES.values():
            with pytest.raises(kind):
                extract(healthy)
        counts.append(live_tensor_count())
    assert counts[2] <= counts[0] + 20


WIRE_CASES: dict[str, tuple[type[trocar.TrocarError], list[bytes | pb.ExtractRequest]]] = {
    "too few bytes": (
        trocar.errors.InvalidTensorError,
        [request("structured", "both", chunks=[chunk(bytes(11))])],
    ),
    "too many bytes": (
        trocar.errors.InvalidTensorError,
        [request("structured", "both", chunks=[chunk(bytes(13))])],
    ),
    "no bytes": (trocar.errors.InvalidTensorError, [request("structured", "both", chunks=[])]),
    "another dtype": (
        trocar.errors.InvalidTensorError,
        [request("structured", "both", inputs=[tensor((1, 3), tensor_pb2.DTYPE_FLOAT64)])],
    ),
    "a gap": (
        trocar.errors.InvalidTensorError,
        [request("structured", "both", chunks=[chunk(bytes(8), offset=4)])],
    ),
    "no dtype": (
        trocar.errors.InvalidTensorError,
        [request("structured", "both", inputs=[tensor((1, 3), 0)])],
    ),
    "negative size": (
        trocar.errors.InvalidTensorError,
        [request("structured", "both", inputs=[tensor((1, -3))])],
    ),
    "rank 9": (trocar.errors.InvalidTensorError, [request("structured", "both", inputs=[tensor((1,) * 9)])]),
    "overflow": (
        trocar.errors.RequestTooLargeError,
        [request("structured", "both", inputs=[tensor((2, 2**62, 2**62))])],
    ),
    "no message": (trocar.errors.InvalidArgumentError, []),
    "an empty message": (trocar.errors.InvalidArgumentError, [b""]),
    "no protobuf": (trocar.errors.InvalidArgumentError, [b"\xff" * 40]),
    "protobuf of another kind": (trocar.errors.InvalidArgumentError, [b"\x0a\x02\xff\xfe"]),
    "garbage after the head": (
        trocar.errors.InvalidArgumentError,
        [request("structured", "both", chunks=[]), b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"],
    ),
}


@pytest.mark.parametrize("case", WIRE_CASES)
def test_a_request_that_contradicts_itself_is_refused(small_server: RunningServer, case: str) -> None:
    kind, messages = WIRE_CASES[case]
    with raw_channel(small_server.address) as channel, pytest.raises(kind) as caught:
        send(channel, *messages)
    assert type(caught.value) is kind
