import io

import numpy as np
import pytest
import soundfile

from trocar_server.training.datasets.stored_sound import check_sound_header


@pytest.mark.parametrize("form", ["WAV", "WAVEX", "FLAC"])
def test_files_of_sound_pass(form: str) -> None:
    sink = io.BytesIO()
    soundfile.write(sink, np.zeros(10), 8_000, format=form)
    check_sound_header(sink.getvalue())


@pytest.mark.parametrize("data", [b"", b"RIFF", b"RIFF\0\0\0\0AVI LIST", b"\xff\xd8\xff", b"ID3\3", b"OggS"])
def test_what_is_no_wav_and_no_flac_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="neither a WAV nor a FLAC"):
        check_sound_header(data)
