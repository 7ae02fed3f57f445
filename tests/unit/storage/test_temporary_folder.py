"""Folders of compiled variants: removed with their process, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from trocar_server.storage.temporary_folder import TemporaryFolder, remove_leftovers

HOLDS = """
import sys
from pathlib import Path
from trocar_server.storage.temporary_folder import TemporaryFolder
folder = TemporaryFolder(Path(sys.argv[1]))
(folder.path / "graph.bin").write_bytes(b"x")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        own = TemporaryFolder(tmp_path)
        assert remove_leftovers(tmp_path) == 0
        assert (path / "graph.bin").exists()
        os.kill(other.pid, signal.SIGKILL)
    assert remove_leftovers(tmp_path) == 1
    assert list(tmp_path.iterdir()) == [own.path]


def test_it_goes_when_it_is_cleaned_up_and_when_its_process_ends(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path)
    (folder.path / "graph.bin").write_bytes(b"x")
    folder.cleanup()
    folder.cleanup()
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "trocar-form-file").write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "trocar-form-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "other").mkdir()
    assert remove_leftovers(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 4
