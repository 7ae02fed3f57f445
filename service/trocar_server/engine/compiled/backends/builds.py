"""Build jobs in a separate process: one at a time, at a low priority, in one thread.

# Note: [Priority of a build]
Linux may divide the CPU among sessions first (`sched_autogroup_enabled`), and only then within each by
priority. A build in a session of its own would get as much as the whole server, at any niceness. So it stays
in the server's session, in a process group of its own: Ctrl-C in a terminal is for the server, and the build
can be killed with all its children. For half a minute `SCHED_IDLE` gives it what the server leaves, and about
0.3 % of a core that is always busy: a build would never end beside callers without a pause. So then it
competes at niceness 8: 14 % of one such core, which takes it seven times as long as an idle one, and calls
1.17 times as long at most. The build takes that priority itself, after it has asked the kernel to end with
the server: with it from the start it needed minutes until it asked, and builds of killed servers piled up,
each with up to 0.5 GB.
"""

import asyncio
import json
import os
import pickle
import signal
import sys
from contextlib import suppress

from trocar_server.engine.compiled.backends.build_worker import Built, Job

_LIMIT_S = 3600.0
"""Of a build; a busy server leaves it little time."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


async def build_apart(job: Job) -> Built:
    """Build in a separate process; any failure there is the `problem` of the result."""
    try:
        message = pickle.dumps(job)
    except Exception as error:  # noqa: BLE001 - a factory that exists in this process only
        return Built(problem=f"the model cannot be built in another process: {error}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trocar_server.engine.compiled.backends.build_worker",
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            output, _ = await process.communicate(message)
    except TimeoutError:
        return Built(problem=f"building took longer than {_LIMIT_S:.0f} s")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return _parsed(output, process.returncode)


def _parsed(output: bytes, code: int | None) -> Built:
    try:
        told = json.loads(output)
    except ValueError:
        return Built(problem=f"the build process ended with code {code} without a result")
    return Built(**{**told, "pairs": tuple(map(tuple, told["pairs"]))})
