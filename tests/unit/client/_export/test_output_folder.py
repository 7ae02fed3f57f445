"""Who may write to a folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from trocar._export.output_folder import open_output
from trocar._export.writers.formats import FORMATS
from trocar.errors import OutputError

JOB = {"batch": 4, "shard_size": 8}


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom trocar._export.disk import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('locked', flush=True)\n    sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with (
            pytest.raises(OutputError, match="another run writes to"),
            open_output(tmp_path, JOB, FORMATS["npy"]),
        ):
            pass
        other.kill()
    with open_output(tmp_path, JOB, FORMATS["npy"]) as output:  # a kill frees it
        assert output.position == 0


def test_what_a_kill_left_is_cleaned_and_nothing_else(tmp_path: Path) -> None:
    with open_output(tmp_path, JOB, FORMATS["npy"]):
        pass
    (tmp_path / "features-00000.part").mkdir()
    (tmp_path / "features-00000.part" / "x.npy").write_bytes(b"half")
    (tmp_path / "features-00001.safetensors.part").write_bytes(b"half")
    (tmp_path / "manifest.json.part").write_bytes(b"{")
    (tmp_path / "mine.part").write_bytes(b"keep")
    with open_output(tmp_path, JOB, FORMATS["npy"]):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "mine.part", "open-shard"]
