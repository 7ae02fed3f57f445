"""Recording which functions each test reaches, over all workers of a run: `--record`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.selection import test_map

if TYPE_CHECKING:
    import pytest

    from tests.support.selection import reached

_FOLDER = "TROCAR_RECORD_FOLDER"
"""Where the workers of a run leave what they recorded."""


class Recording:
    """What a run records: a part in each process, the whole in the one that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self._worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        runs_tests = bool(self._worker) or not config.getoption("numprocesses", None)
        self._recorder: reached.Recorder | None = None
        if runs_tests:
            from tests.support.selection.reached import Recorder

            # `test_x[a]` leaves out other parameters before anything is collected.
            self._recorder = Recorder(is_choice=any("[" in word for word in config.args))
        self._parts: tempfile.TemporaryDirectory[str] | None = None
        if not self._worker:
            self._parts = tempfile.TemporaryDirectory(prefix="trocar-reached-")
            os.environ[_FOLDER] = self._parts.name
        if self._recorder is not None:
            config.pluginmanager.register(self._recorder, "trocar-recorder")

    def finish(self) -> str:
        """Write the part of this process, or the map; return what there is to say of it."""
        from tests.support.selection import reached

        folder = Path(os.environ[_FOLDER])
        if self._recorder is not None:
            reached.write_part(folder, self._worker or "main", self._recorder.close())
        if self._parts is None:
            return ""
        with self._parts:
            recorded = list(reached.read_parts(folder))
        made = test_map.merged(test_map.read(test_map.FILE), recorded)
        test_map.write(made, test_map.FILE)
        return f"{test_map.FILE.name}: {len(made.functions)} functions, {len(recorded)} tests recorded"


def add_options(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("trocar").addoption(
        "--record",
        action="store_true",
        help="write tests/reached.json, from which `make test-changed` chooses",
    )


def begin(config: pytest.Config) -> Recording | None:
    """Start recording, if this run does."""
    return Recording(config) if config.getoption("record") else None
