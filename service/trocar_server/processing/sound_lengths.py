"""Lengths of clips of sound, from their headers; and the bytes that a feature extractor makes of them.

Needs neither soundfile nor a process: what padding makes of clips is counted before a worker gets them.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from trocar_server.padding import check_padded_bytes, padded_count

_FLAC_BLOCK = 8
"""Where the contents of a FLAC file's first block begin, which is always that of the stream's size."""
_CHUNKS_LOOKED_AT = 64
_PLAIN_FORMATS = (1, 3)
"""WAV's integers and floats: each frame has the same bytes. Other formats are compressed."""
_EXTENSIBLE = 0xFFFE
_VALUE_BYTES = 4
_USUAL_RATE = 16_000
_FRAME_STEPS = 3
"""Steps that the last frame of a clip may reach over: 25 ms each 10 ms."""


def encoded_length(data: bytes | memoryview) -> int:
    """Return the samples of a WAV or FLAC file with one channel, by its header; 0 where it does not tell.

    What a file claims beyond its own bytes does not count for WAV, whose samples are not compressed.
    """
    start = bytes(data[:4])
    if start == b"fLaC":
        return _flac_length(data)
    return _wav_length(data) if start == b"RIFF" else 0


def _flac_length(data: bytes | memoryview) -> int:
    block = bytes(data[_FLAC_BLOCK : _FLAC_BLOCK + 18])
    if len(block) < 18 or data[4] & 0x7F:
        return 0
    return int.from_bytes(block[13:18]) & ((1 << 36) - 1)


def _wav_length(data: bytes | memoryview) -> int:
    position, frame_bytes = 12, 0
    for _ in range(_CHUNKS_LOOKED_AT):
        head = bytes(data[position : position + 8])
        if len(head) < 8:
            return 0
        name, size = struct.unpack("<4sI", head)
        position += 8
        if name == b"fmt " and size >= 16:
            if len(data) < position + 14:
                return 0
            kind, frame_bytes = struct.unpack_from("<H10xH", data, position)
            if kind not in (*_PLAIN_FORMATS, _EXTENSIBLE):
                return 0
        if name == b"data":
            return min(size, len(data) - position) // frame_bytes if frame_bytes else 0
        position += size + size % 2
    return 0


def made_bytes(settings: Mapping[str, Any], lengths: Sequence[int]) -> int:
    """Return the bytes, at least, of what a feature extractor makes of clips, all padded to the longest.

    Args:
        settings: The extractor's attributes, as its file has them (transformers 5.23).
        lengths: The samples of each clip.
    """
    rate = _number(settings, "sampling_rate", _USUAL_RATE)
    window = _number(
        settings, "n_samples", _number(settings, "chunk_length", 0) * rate
    )  # Whisper's pads to it
    window = _number(settings, "nb_max_samples", window)  # CLAP's
    width, least = _number(settings, "feature_size", 1), 0
    if width == 1 and "max_length" in settings:  # AST's: it pads to so many frames, of so many values
        width, least = _number(settings, "num_mel_bins", 1), _number(settings, "max_length", 0)
    if width == 1:
        return padded_count([(length,) for length in lengths], (window,)) * _VALUE_BYTES
    step = _number(settings, "hop_length", max(1, rate // 100))
    frames = [(max(0, length - _FRAME_STEPS * step) // step,) for length in lengths]
    return padded_count(frames, (max(least, window // step),)) * width * _VALUE_BYTES


def check_sound(settings: Mapping[str, Any], lengths: Sequence[int], most_bytes: int) -> int:
    """Return the bytes, at least, that clips become; see `made_bytes`.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    byte_count = made_bytes(settings, lengths) if lengths else 0
    longest_s = max(lengths, default=0) / _number(settings, "sampling_rate", _USUAL_RATE)
    check_padded_bytes("clips", len(lengths), f"{longest_s:.4g} s", byte_count, most_bytes)
    return byte_count


def _number(settings: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise
