"""Sound shards: clips in memory, each as a WAV file of float32 samples; encoded ones as they are."""

import struct

from trocar._request.texts import Audio
from trocar._uploads.shards import sound_parts
from trocar._uploads.text_shards import encoded_plan
from trocar._uploads.upload_plan import UploadPlan
from trocar_api.v1 import extraction_pb2 as pb

_FLOAT = 3
"""WAVE_FORMAT_IEEE_FLOAT."""
_SAMPLE_BYTES = 4


def sound_plan(given: Audio, targets: object, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of clips in memory.

    Args:
        given: One for each sample.
        targets: As in `array_plan`.
        name: Name of the data set.
        shard_bytes: Of one shard.

    Raises:
        TypeError: A target cannot be stored.
        ValueError: Clips and targets are not for the same number of samples.
    """
    return encoded_plan(encoded_clips(given), "clips", sound_parts, targets, name, shard_bytes)


def encoded_clips(given: Audio) -> list[bytes]:
    """Return clips as the server stores them."""
    return [_encoded(clip, payload) for clip, payload in given.clips]


def _encoded(clip: pb.AudioClip, payload: memoryview) -> bytes:
    if clip.WhichOneof("form") == "encoded_byte_count":
        return bytes(payload)
    return wav_file(bytes(payload), clip.raw.sample_rate)


def wav_file(samples: bytes, rate: int) -> bytes:
    """Return a WAV file of float32 samples, one channel, little-endian; its values are exactly these."""
    form = struct.pack("<HHIIHHH", _FLOAT, 1, rate, rate * _SAMPLE_BYTES, _SAMPLE_BYTES, 8 * _SAMPLE_BYTES, 0)
    fact = struct.pack("<I", len(samples) // _SAMPLE_BYTES)
    body = b"WAVE" + _chunk(b"fmt ", form) + _chunk(b"fact", fact) + _chunk(b"data", samples)
    return _chunk(b"RIFF", body)


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data
