"""Build jobs in a separate process: one at a time, at a low priority."""

import asyncio
import json
import os
import pickle
import sys
from contextlib import suppress

from trocar_server.engine.compiled.backends.build_worker import Built, Job

_LIMIT_S = 600.0
_NICENESS = 10


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
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
    try:
        async with asyncio.timeout(_LIMIT_S):
            output, _ = await process.communicate(message)
    except TimeoutError:
        return Built(problem=f"building took longer than {_LIMIT_S:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _parsed(output, process.returncode)


def _parsed(output: bytes, code: int | None) -> Built:
    try:
        found = json.loads(output)
    except ValueError:
        return Built(problem=f"the build process ended with code {code} without a result")
    return Built(tuple(map(tuple, found["pairs"])), found["has_graph"], found["problem"])
