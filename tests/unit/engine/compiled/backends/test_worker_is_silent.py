"""What is built apart tells nobody: OpenVINO's converter would report to its maker."""

import json
import os
import pickle
import subprocess
import sys
from importlib.machinery import PathFinder

import pytest

_PROGRAM = """
import os, sys
from trocar_server.engine.compiled.backends import build_worker as worker
sys.argv.append(str(os.getppid()))

def build(job):
    from openvino.tools.ovc import telemetry_utils
    return worker.Built(problem=telemetry_utils.tm.__name__)

worker.build = build
worker.main()
"""


@pytest.mark.parametrize("buffering", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_the_converter_has_nothing_to_report_with(buffering: dict[str, str]) -> None:
    if PathFinder.find_spec("openvino_telemetry") is None:
        pytest.skip("without it there is nothing to hold back")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=pickle.dumps(None),
        capture_output=True,
        check=True,
        env=environment | buffering,
    )
    assert json.loads(done.stdout)["problem"] == "openvino.tools.ovc.telemetry_stub"
