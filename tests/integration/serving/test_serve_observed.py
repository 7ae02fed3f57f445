"""`trocar serve` as a process: its flags of metrics and log."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import trocar
from tests.support.servers import warm_python
from tests.support.servers.scraping import WAIT_S, Scrape


def test_flags_start_metrics_and_choose_the_format_of_lines(tmp_path: Path) -> None:
    words = ("serve", "--port", "0", "--metrics-port", "0", "--log-format", "json", "--device", "cpu")
    environment = {**os.environ, "TROCAR_DATA_DIR": str(tmp_path)}
    process = warm_python.Popen(
        [sys.executable, "-m", "trocar", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        ready, metrics = process.stdout.readline(), process.stdout.readline()
        address, shown = re.search(r"127\S+", ready), re.search(r"127\.0\.0\.1:\d+", metrics)
        assert address is not None, process.communicate()
        assert shown is not None
        with trocar.connect(address[0]) as client:
            client.models()
        with urllib.request.urlopen(f"http://{shown[0]}/metrics", timeout=WAIT_S) as answer:
            found = Scrape(answer.read().decode())
    finally:
        process.send_signal(signal.SIGTERM)
        _, written = process.communicate(timeout=WAIT_S)
    lines = [json.loads(line) for line in written.splitlines()]
    (call,) = [line for line in lines if line["event"] == "call"]
    assert (call["method"], call["code"]) == ("/trocar_api.v1.ModelService/ListModels", "OK")
    assert found.value("grpc_server_handled_total", grpc_method="ListModels") == 1
    assert process.returncode == 0
