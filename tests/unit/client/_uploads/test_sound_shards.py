import io

import numpy as np
import pytest
import soundfile

import trocar
from trocar._uploads.sound_shards import sound_plan, wav_file


@pytest.mark.parametrize("count", [1, 7, 16_000])
def test_a_wav_file_of_a_clip_reads_back_bit_for_bit(count: int) -> None:
    clip = np.random.default_rng(0).standard_normal(count).astype("<f4")
    found, rate = soundfile.read(io.BytesIO(wav_file(clip.tobytes(), 22_050)), dtype="float32")
    assert rate == 22_050
    np.testing.assert_array_equal(found, clip)


def test_clips_are_cut_into_shards_with_their_labels() -> None:
    clips = [np.zeros(100, np.float32)] * 5
    plan = sound_plan(trocar.audio(clips, 8_000), ["siren", "bird", "bird", "siren", "bird"], "sounds", 1_000)
    assert (plan.name, plan.sample_count, plan.categories) == ("sounds", 5, ("bird", "siren"))
    assert [shard.sample_count for shard in plan.shards()] == [2, 2, 1]
