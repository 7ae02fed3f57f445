"""Small inputs that padding makes large are counted and refused before a worker starts, and not retried."""

import io
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from transformers import Wav2Vec2ForSequenceClassification, WhisperFeatureExtractor

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server
from trocar import Client
from trocar._request.texts import sound_input
from trocar.errors import RequestTooLargeError
from trocar_api.reasons import ErrorReason
from trocar_server.decoding.process import WorkerProcess
from trocar_server.errors import ServiceError
from trocar_server.processing.sound_lengths import encoded_length, made_bytes

RATE = 16_000
BUDGET = 1 << 20
COUNT = 20
HUNGRY = (
    "{% if messages[0]['content'] == 'hungry' %}{{ 'x' * 9999999999 }}"
    "{% else %}{{ 'the ' * 9000 }}{% endif %}"
)
LIMITS = {"max_principal_bytes": BUDGET}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    waves = text_models.save_wav2vec2(tmp_path_factory.mktemp("waves"), Wav2Vec2ForSequenceClassification)
    words = text_models.save_tokenizer(tmp_path_factory.mktemp("words"))
    models: dict[str, Any] = {
        "waves": {"source": f"hf:{waves}"},
        "bert": {"factory": f"{text_models.__name__}:bert", "input_shape": (4,), "processor": words},
    }
    with running_server(models=models, device="cpu", limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[Client]:
    with trocar.connect(running.address) as found:
        yield found


def flac(seconds: float) -> bytes:
    sink = io.BytesIO()
    soundfile.write(sink, np.zeros(round(seconds * RATE), np.float32), RATE, format="FLAC")
    return sink.getvalue()


def bomb(long: bytes, count: int) -> Any:
    """Return a long clip and many of 400 samples, the fewest that the model takes."""
    short = trocar.audio([np.zeros(400, np.float32)] * count, RATE)
    return type(short)((*sound_input(long).clips, *short.clips))


def compressed(seconds: float) -> bytes:
    """Return a WAV file whose header does not tell how many samples its bytes become."""
    sink = io.BytesIO()
    silence = np.zeros(round(seconds * RATE), np.float32)
    soundfile.write(sink, silence, RATE, format="WAV", subtype="MS_ADPCM")
    return sink.getvalue()


@pytest.mark.parametrize("format_", ["FLAC", "WAV"])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
def test_the_length_of_a_clip_is_read_from_its_header(format_: str, subtype: str) -> None:
    sink = io.BytesIO()
    soundfile.write(sink, np.zeros(12_345, np.float32), RATE, format=format_, subtype=subtype)
    data = sink.getvalue()
    assert encoded_length(data) == encoded_length(memoryview(data)) == 12_345
    assert encoded_length(data[:20]) == 0


@pytest.mark.parametrize("data", [b"", b"RIFF", b"fLaC", b"fLaC\0\0\0\x22" + bytes(9), b"RIFF" + bytes(60)])
def test_damaged_headers_have_no_length(data: bytes) -> None:
    assert encoded_length(data) == encoded_length(compressed(1)) == 0


def test_sound_that_padding_makes_large_starts_no_worker(running: RunningServer, client: Client) -> None:
    """A file of some kilobytes, and 20 clips of 1.6 KB become 1.3 MB."""
    before = running.engine.preparation.processor.pids
    with pytest.raises(RequestTooLargeError, match=r"21 clips become at least 1,344,000 bytes") as caught:
        client.extract("waves", bomb(flac(1), COUNT), ["wav2vec2.encoder"])
    assert caught.value.details["limit"] == str(BUDGET)
    assert running.engine.preparation.processor.pids == before


def test_no_refused_sound_keeps_memory_reserved(running: RunningServer, client: Client) -> None:
    for sound in (bomb(flac(1), COUNT), bomb(compressed(1), COUNT)):
        with pytest.raises(RequestTooLargeError):
            client.extract("waves", sound, ["wav2vec2.encoder"])
    assert running.engine.admission.reserved()[0] == 0
    maps = client.extract("waves", bomb(flac(0.1), 3), ["wav2vec2.encoder"])
    assert maps.processed[0].lengths == (1600, 400, 400, 400)


def test_a_length_that_the_header_does_not_tell_is_counted_by_the_worker(client: Client) -> None:
    with pytest.raises(RequestTooLargeError, match="become at least"):
        client.extract("waves", bomb(compressed(1), COUNT), ["wav2vec2.encoder"])


def test_a_window_that_all_clips_are_padded_to_is_counted() -> None:
    make: Any = WhisperFeatureExtractor  # untyped (transformers 5.23)
    extractor = make(feature_size=80, chunk_length=30)
    clips = [np.zeros(160, np.float32)] * 3
    made = extractor(clips, sampling_rate=RATE, return_tensors="np")["input_features"].nbytes
    assert made_bytes(vars(extractor), [len(clip) for clip in clips]) == made


def test_a_batch_of_a_stream_counts_it_and_the_others_are_answered(client: Client) -> None:
    sounds = [bomb(flac(0.1), 2), bomb(flac(1), COUNT), bomb(flac(0.1), 2)]
    with client.extract_stream("waves", sounds, ["wav2vec2.encoder"]) as stream:
        results = list(stream)
    assert [type(result.error) for result in results] == [type(None), RequestTooLargeError, type(None)]


def test_a_step_counts_it(running: RunningServer, client: Client) -> None:
    before = running.engine.preparation.processor.pids
    with client.train("waves") as trainer, pytest.raises(RequestTooLargeError, match="become at least"):
        trainer.step(bomb(flac(1), COUNT), np.zeros(COUNT + 1, np.int64))
    assert running.engine.preparation.processor.pids == before


def test_a_fit_counts_it_and_says_what_to_change(client: Client, tmp_path: Path) -> None:
    for index in range(COUNT + 1):
        folder = tmp_path / "sounds" / ("bird", "siren")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.flac").write_bytes(flac(1 if index == COUNT else 0.1))
    dataset = client.upload_dataset(tmp_path / "sounds")
    with client.train("waves") as trainer:
        with pytest.raises(RequestTooLargeError, match=r"become at least .*: use a smaller batch_size"):
            trainer.fit(dataset, epochs=1, batch_size=COUNT + 1)
        assert trainer.fit(dataset, epochs=1, batch_size=2).outcome == "finished"


def test_token_ids_that_padding_makes_too_many_start_no_worker(
    running: RunningServer, client: Client
) -> None:
    rows = [list(range(5)) * 800, *[[1]] * 99]
    before = running.engine.preparation.processor.pids
    with pytest.raises(RequestTooLargeError, match="the batch has 400,000 tokens with its padding"):
        client.extract("bert", trocar.texts(rows), ["model.encoder.layer.1"])
    assert running.engine.preparation.processor.pids == before


def test_a_template_that_makes_much_of_a_little_is_stopped(tmp_path: Path) -> None:
    """Characters of all chats together count; a worker that runs out of memory says so and is replaced."""
    folder = text_models.save_tokenizer(tmp_path, chat_template=HUNGRY)
    model = {"factory": f"{text_models.__name__}:bert", "input_shape": (4,), "processor": folder}
    limits = {"max_principal_bytes": 1 << 20}
    layer, chats = "model.encoder.layer.1", [[("user", "short")]] * 40
    with (
        running_server(models={"bert": model}, limits=limits) as server,
        trocar.connect(server.address) as found,
    ):
        with pytest.raises(RequestTooLargeError, match="more memory to be processed than a worker process"):
            found.extract("bert", trocar.chat([("user", "hungry")]), [layer])
        with pytest.raises(RequestTooLargeError, match="the chat template makes 1,080,000 characters"):
            found.extract("bert", trocar.chat(chats, truncate=True, max_tokens=4), [layer])
        assert found.extract("bert", "the cat", [layer]).tokens.lengths == (4,)


def test_workers_have_a_limit_of_their_own(running: RunningServer, client: Client) -> None:
    client.extract("waves", bomb(flac(0.1), 2), ["wav2vec2.encoder"])
    client.extract("bert", "the cat", ["model.encoder.layer.1"])
    pids = running.engine.preparation.processor.pids
    assert len(pids) == 2
    for pid in pids:
        soft, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
        assert 0 < soft <= (2 << 30) + 5 * BUDGET


def test_an_answer_beyond_the_budget_is_not_read() -> None:
    process = WorkerProcess("tests.support.servers.talking_worker")

    def refuse(answer: dict[str, Any]) -> int:
        raise ServiceError(ErrorReason.REQUEST_TOO_LARGE, f"{answer['size']} bytes")

    with pytest.raises(ServiceError, match="1000000000000 bytes"):
        process.ask({"size": 10**12}, b"", refuse)
    assert process.pid is None
    assert process.ask({"size": 3}, b"", lambda answer: int(answer["size"]))[1] == b"xxx"
    process.end()
