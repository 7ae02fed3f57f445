"""The run on a GPU: its parts, and what it writes of parts that fail or hang."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_profile, gpu_run
from benchmarks.gpu_run import TIMED_OUT, Part


def test_all_tests_that_need_a_gpu_are_in_its_files() -> None:
    assert "tests/integration/surgery/test_graphs.py" in gpu_run.files_of_tests()
    assert len(gpu_run.files_of_tests()) >= 6


def test_its_limits_are_under_half_an_hour(tmp_path: Path) -> None:
    assert sum(part.limit_s for part in gpu_run.parts(tmp_path).values()) <= 28 * 60


def test_a_part_that_fails_or_hangs_costs_the_others_nothing(tmp_path: Path) -> None:
    python = sys.executable
    found = gpu_run.run(
        tmp_path,
        {
            "failing": Part((python, "-c", "print('first'); raise SystemExit(3)"), 60),
            "hanging": Part((python, "-c", "import threading; threading.Event().wait()"), 0.5),
            "good": Part((python, "-c", "print('last')"), 60),
        },
    )
    assert [part["status"] for part in found.values()] == [3, TIMED_OUT, 0]
    assert (tmp_path / "failing.txt").read_text() == "first\n"
    assert (tmp_path / "good.txt").read_text() == "last\n"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["parts"] == found
    assert summary["machine"]["torch"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_run.main(tmp_path) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_profiles_are_written(tmp_path: Path) -> None:
    gpu_profile.main(tmp_path, device="cpu", model="resnet18", side=32)
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {
        f"{case}.{end}"
        for case in ("batch-1", "batch-32", "every-module", "edited")
        for end in ("txt", "json.gz")
    }
