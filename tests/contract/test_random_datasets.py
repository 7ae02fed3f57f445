"""Whatever is sent to `DatasetService` is answered with a reason, never with a defect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.test_random_requests import DEFECTS, unary_answer
from tests.support.files.scale import count
from tests.support.servers.running_server import running_server
from tests.support.wire.wire import CALL_TIMEOUT_S, raw_channel
from trocar_api.v1 import dataset_pb2 as pb

_TEXTS = st.sampled_from(["", "a", "0" * 32, "0" * 64, "../x", "\ud7ff", "é" * 300, "a\n"])
_NUMBERS = st.sampled_from([0, 1, -1, 2, 1 << 31, -(1 << 63), (1 << 63) - 1])
_SHARDS = st.builds(pb.DatasetShard, sha256=_TEXTS, byte_count=_NUMBERS, sample_count=_NUMBERS)
_MANIFESTS = st.builds(
    pb.DatasetManifest,
    name=_TEXTS,
    sample_count=_NUMBERS,
    categories=st.lists(_TEXTS, max_size=3),
    shards=st.lists(_SHARDS, max_size=3),
)
_PARTS = st.builds(pb.UploadShardRequest, dataset_id=_TEXTS, sha256=_TEXTS, data=st.binary(max_size=20))


def _with_id(text: str) -> bytes:
    return pb.GetDatasetRequest(dataset_id=text).SerializeToString()


_METHODS = ("BeginUpload", "CommitUpload", "ListDatasets", "GetDataset", "DeleteDataset")
relaxed = settings(max_examples=count(200), deadline=None)


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    data_dir: Path = tmp_path_factory.mktemp("data")
    with (
        running_server(models={}, device="cpu", data_dir=data_dir) as running,
        raw_channel(running.address) as opened,
    ):
        yield opened


@relaxed
@given(_MANIFESTS)
def test_no_manifest_is_answered_with_a_defect(channel: grpc.Channel, manifest: pb.DatasetManifest) -> None:
    message = pb.BeginUploadRequest(manifest=manifest).SerializeToString()
    assert unary_answer(channel, "DatasetService/BeginUpload", message) not in DEFECTS


@relaxed
@given(st.sampled_from(_METHODS), st.binary(max_size=40) | _TEXTS.map(_with_id))
def test_no_bytes_are_answered_with_a_defect(channel: grpc.Channel, method: str, data: bytes) -> None:
    assert unary_answer(channel, f"DatasetService/{method}", data) not in DEFECTS


@relaxed
@given(st.lists(st.binary(max_size=20) | _PARTS.map(lambda part: part.SerializeToString()), max_size=3))
def test_no_shard_is_answered_with_a_defect(channel: grpc.Channel, messages: list[bytes]) -> None:
    method: Any = channel.stream_unary("/trocar_api.v1.DatasetService/UploadShard", None, None)
    with pytest.raises(grpc.RpcError) as caught:
        method(iter(messages), timeout=CALL_TIMEOUT_S)
    error: Any = caught.value
    assert error.code() not in DEFECTS
