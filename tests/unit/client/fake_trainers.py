"""A server of one trainer that computes nothing: it counts calls, and fails where a test wants it to."""

# ruff: noqa: N802 - gRPC's methods have such names

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import numpy as np
from safetensors.numpy import save

from tests.unit.client.fake_server import error_trailer
from trocar_api.v1 import dataset_pb2, dataset_pb2_grpc, fit_pb2, fit_pb2_grpc, trainer_pb2_grpc
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRAINER_ID = "a" * 32
WEIGHTS = {"fc.weight": np.arange(60_000, dtype=np.float32)}
CONTENT = save(WEIGHTS)
PIECE = 50_000


def _missing(*_: Any) -> NoReturn:
    raise NotImplementedError


class FakeTrainers(
    trainer_pb2_grpc.TrainerServiceServicer,
    fit_pb2_grpc.FitServiceServicer,
    dataset_pb2_grpc.DatasetServiceServicer,
):
    """A real gRPC server on port 0.

    Attributes:
        calls: Names of the calls, in order.
        applied: Numbers of the calls that were applied, in order.
        left_s: Seconds until the deadline of each call, in order.
        request_ids: The id of each call's request, in order.
        failing: Called with the name of each call and its request; may raise `RefusedError`.
        pieces: How often an export sends before it breaks; None for no break.
        is_older: Whether it does not know `waits_for_step`.
        events: What a fit tells; each watcher gets at most `events_per_call`.
    """

    ListTrainers: Any = _missing
    SaveTrainer: Any = _missing
    ListCheckpoints: Any = _missing
    PublishTrainer: Any = _missing
    ControlFit: Any = _missing
    UploadShard: Any = _missing
    ListDatasets: Any = _missing
    GetDataset: Any = _missing
    DeleteDataset: Any = _missing

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.left_s: list[float] = []
        self.request_ids: list[str] = []
        self.applied: list[int] = []
        self.failing: Callable[[str, Any], None] = lambda *_: None
        self.pieces: list[int | None] = []
        self.update_count = 1
        self.is_older = False
        self.events: list[fit_pb2.FitEvent] = []
        self.events_per_call = 100
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, self._server)
        fit_pb2_grpc.add_FitServiceServicer_to_server(self, self._server)
        dataset_pb2_grpc.add_DatasetServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """End it."""
        self._server.stop(0).wait()

    def CreateTrainer(self, request: Any, context: Any) -> pb.CreateTrainerResponse:
        self._begin("CreateTrainer", request, context)
        return pb.CreateTrainerResponse(trainer=self._trainer())

    def GetTrainer(self, request: Any, context: Any) -> pb.GetTrainerResponse:
        self._begin("GetTrainer", request, context)
        has_waited = request.waits_for_step and not self.is_older
        return pb.GetTrainerResponse(trainer=self._trainer(), has_waited=has_waited)

    def CloseTrainer(self, request: Any, context: Any) -> pb.CloseTrainerResponse:
        self._begin("CloseTrainer", request, context)
        return pb.CloseTrainerResponse()

    def RestoreTrainer(self, request: Any, context: Any) -> pb.RestoreTrainerResponse:
        self._begin("RestoreTrainer", request, context)
        self.applied.clear()
        return pb.RestoreTrainerResponse(trainer=self._trainer())

    def StepOptimizer(self, request: Any, context: Any) -> pb.StepOptimizerResponse:
        self._begin("StepOptimizer", request, context)
        return pb.StepOptimizerResponse(result=self._apply(request.number))

    def Train(self, request_iterator: Iterator[pb.TrainRequest], context: Any) -> Iterator[pb.TrainResponse]:
        request = next(request_iterator)
        self._begin("Train", request, context)
        if request.kind == pb.TRAIN_KIND_EVALUATE:
            yield pb.TrainResponse(result=pb.StepResult(loss=0.5, sample_count=4, correct_count=3))
        else:
            yield pb.TrainResponse(result=self._apply(request.number))

    def LoadAdapter(self, request_iterator: Any, context: Any) -> pb.LoadAdapterResponse:
        self._begin("LoadAdapter", next(iter(request_iterator)), context)
        return pb.LoadAdapterResponse()

    def ExportTrainer(self, request: Any, context: Any) -> Iterator[pb.ExportTrainerResponse]:
        self._begin("ExportTrainer", request, context)
        left = self.pieces.pop(0) if self.pieces else None
        is_first = True
        for offset in range(request.offset_bytes, len(CONTENT), PIECE):
            if left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            left = None if left is None else left - 1
            message = pb.ExportTrainerResponse(data=CONTENT[offset : offset + PIECE])
            if is_first:
                message.byte_count, message.update_count = len(CONTENT), self.update_count
                is_first = False
            yield message

    def UnpublishModel(self, request: Any, context: Any) -> pb.UnpublishModelResponse:
        self._begin("UnpublishModel", request, context)
        return pb.UnpublishModelResponse()

    def StartFit(self, request: Any, context: Any) -> fit_pb2.StartFitResponse:
        self._begin("StartFit", request, context)
        return fit_pb2.StartFitResponse(first_event_number=0)

    def WatchFit(self, request: Any, context: Any) -> Iterator[fit_pb2.WatchFitResponse]:
        self._begin("WatchFit", request, context)
        for event in self.events[request.event_number :][: self.events_per_call]:
            yield fit_pb2.WatchFitResponse(event=event)

    def BeginUpload(self, request: Any, context: Any) -> dataset_pb2.BeginUploadResponse:
        self._begin("BeginUpload", request, context)
        return dataset_pb2.BeginUploadResponse(dataset_id="d" * 32)

    def CommitUpload(self, request: Any, context: Any) -> dataset_pb2.CommitUploadResponse:
        self._begin("CommitUpload", request, context)
        return dataset_pb2.CommitUploadResponse(dataset=dataset_pb2.Dataset(dataset_id="d" * 32))

    def _apply(self, number: int) -> pb.StepResult:
        with self._lock:
            self.applied.append(number)
        return pb.StepResult(number=number, loss=1.0, is_update=True, gradient_norm=0.0)

    def _trainer(self) -> pb.Trainer:
        return pb.Trainer(
            trainer_id=TRAINER_ID,
            spec=pb.TrainerSpec(model_id="resnet18"),
            next_number=len(self.applied),
            state="ready",
            trainable=["fc.weight", "fc.bias"],
            trainable_element_count=5_130,
            frozen_element_count=11_176_512,
            byte_count=50_000,
        )

    def _begin(self, name: str, request: Any, context: Any) -> None:
        with self._lock:
            self.calls.append(name)
            self.requests.append(request)
            self.left_s.append(context.time_remaining() or 0.0)
            self.request_ids.append(dict(context.invocation_metadata())["x-request-id"])
        try:
            self.failing(name, request)
        except RefusedError as refused:
            refused.abort(context)


class RefusedError(Exception):
    """What a test lets a call fail with."""

    def __init__(
        self, code: grpc.StatusCode, reason: str = "", message: str = "no", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after_s = code, reason, message, retry_after_s

    def abort(self, context: Any) -> NoReturn:
        if self.reason:
            trailer = error_trailer(self.code, self.message, self.reason, self.retry_after_s)
            context.set_trailing_metadata((trailer,))
        context.abort(self.code, self.message)
        raise AssertionError("abort raises")
