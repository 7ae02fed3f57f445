"""What is too large is refused, whatever way it takes to become so."""

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import OnlyNegative, TellsPaths
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import chunk, extract_call, raw_channel, request, send

pytestmark = pytest.mark.usefixtures("unharmed")


def test_a_message_over_the_limit_is_refused(small_server: RunningServer) -> None:
    message = request("structured", "both", chunks=[chunk(bytes(20 << 20))])
    with (
        raw_channel(small_server.address, max_send_message_length=-1) as channel,
        pytest.raises(trocar.errors.RequestTooLargeError),
    ):
        send(channel, message)


def test_a_message_that_unpacks_to_more_than_the_limit_is_refused(small_server: RunningServer) -> None:
    message = request("structured", "both", chunks=[chunk(bytes(64 << 20))]).SerializeToString()
    with (
        raw_channel(small_server.address, max_send_message_length=-1) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(extract_call(channel, [message], compression=grpc.Compression.Gzip))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("field", [b"\x72\x00", b"\x7a\x00"], ids=["fields", "chunks"])
def test_a_message_of_a_million_fields_is_not_walked_through(
    small_server: RunningServer, field: bytes
) -> None:
    with (
        raw_channel(small_server.address, max_send_message_length=-1) as channel,
        pytest.raises(trocar.errors.InvalidArgumentError, match="65,536 fields"),
    ):
        send(channel, field * (1 << 20))


def test_a_reply_whose_size_depends_on_the_data_does_not_pass_the_limit(serve: Serve) -> None:
    """The recording saw values in [0, 1) and none below zero; the real input has nothing else."""
    running = serve(models={"negative": custom(OnlyNegative)}, limits={"max_reply_bytes": 1 << 12})
    with trocar.connect(running.address) as connected, pytest.raises(trocar.errors.ReplyTooLargeError):
        connected.extract("negative", -np.ones((50, 100), np.float32), taps="chosen")


def test_the_form_that_modules_are_listed_for_is_limited_as_inputs_are(serve: Serve) -> None:
    """A model that needs data is run on an input of that form, made up by the server."""
    running = serve(models={"negative": custom(OnlyNegative)}, limits={"max_request_bytes": 1 << 12})
    with trocar.connect(running.address) as connected, pytest.raises(trocar.errors.RequestTooLargeError):
        connected.modules("negative", (64, 1024))


def test_an_error_of_the_model_names_no_path_of_the_machine(serve: Serve) -> None:
    running = serve(models={"m": custom(TellsPaths)})
    with (
        trocar.connect(running.address) as connected,
        pytest.raises(trocar.errors.InputRejectedError) as caught,
    ):
        connected.extract("m", noise(1, 7), taps="/out")
    assert "/home/operator" not in str(caught.value)
