"""The priority of a build: first what the server leaves, then a share of a core that is always busy."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, os, threading
from trocar_server.engine.compiled.backends import build_worker as worker

def states():
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    return {(os.sched_getscheduler(one), os.getpriority(os.PRIO_PROCESS, one)) for one in threads}

worker._IDLE_S = 3600.0
niceness, begun = os.getpriority(os.PRIO_PROCESS, 0), threading.Event()
worker._limit_itself()
threading.Thread(target=begun.wait, daemon=True).start()  # a thread that was begun meanwhile
idle = states()
worker._take_a_share()
print(json.dumps([niceness, sorted(idle), sorted(states()), os.SCHED_IDLE, os.SCHED_OTHER]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of Linux")
def test_a_build_waits_for_the_server_and_then_takes_a_share() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    niceness, idle, sharing, idle_policy, usual_policy = json.loads(done.stdout)
    assert idle == [[idle_policy, min(niceness + 8, 19)]]
    assert sharing == [[usual_policy, min(niceness + 8, 19)]]
