"""Stored sound: one clip of a data set of sound, a WAV or FLAC file as it was uploaded."""


class Clips(tuple[bytes, ...]):
    """Clips of a batch, undecoded: the model's feature extractor takes them in a process of its own."""

    __slots__ = ()


def check_sound_header(data: bytes) -> None:
    """Refuse what does not begin as a WAV or FLAC file.

    Raises:
        ValueError: It does not.
    """
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    if not (is_wav or data[:4] == b"fLaC"):
        raise ValueError("it is neither a WAV nor a FLAC file")
