"""Batches of trainers that came before: read as without what is kept of them."""

from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.wire import Chunk, chunk_parts
from trocar_server.rpc.transfer.train_requests import BatchPlans

_NUMBER_TAG = pb.TrainRequest.NUMBER_FIELD_NUMBER << 3


def message(number: int | None, trainer_id: str = "a" * 32, data: bytes = b"abcd") -> bytes:
    head = pb.TrainRequest(trainer_id=trainer_id, kind=pb.TRAIN_KIND_STEP, number=number)
    return head.SerializeToString() + b"".join(chunk_parts(0, 0, memoryview(data)))


def test_number_and_data_are_each_messages_own() -> None:
    plans = BatchPlans()
    for number in (0, 1, 127, 128, 129, 16_383, 16_384, 5, None, 6):
        data = str(number).ljust(6).encode()
        head, found, chunks, sizes = plans.read(message(number, data=data))
        assert found == number
        assert [bytes(chunk.data) for chunk in chunks] == [data]
        assert (head.request.trainer_id, head.request.HasField("number")) == ("a" * 32, False)
        assert sizes in (None, [6])
    assert plans.read(message(7, data=b"123456"))[3] == [6]  # known by now
    assert plans.read(message(7, "b" * 32, b"123456"))[0].request.trainer_id == "b" * 32


def test_a_number_of_other_bytes_of_the_same_size_is_read_as_protobuf_does() -> None:
    plans, chunk = BatchPlans(), b"".join(chunk_parts(0, 0, memoryview(b"abcd")))
    plans.read(bytes([_NUMBER_TAG, 0x80, 0x01]) + chunk)  # 128, which is kept
    assert plans.read(bytes([_NUMBER_TAG, 0x81, 0x01]) + chunk)[1:] == (
        129,
        [Chunk(0, 0, memoryview(b"abcd"))],
        [4],
    )
    assert plans.read(bytes([_NUMBER_TAG, 0x85, 0x00]) + chunk)[1] == 5  # longer than it need be
    other = bytes([_NUMBER_TAG, 0x05, 0x80]) + chunk  # the number ends early, and an unknown field follows
    assert pb.TrainRequest.FromString(other).number == 5
    assert plans.read(other)[1:] == (5, [], None)
