"""Compiled variants built within the process of the test: another one needs seconds to start."""

from concurrent.futures import ThreadPoolExecutor

from tests.support.servers.running_server import RunningServer
from trocar_server.engine.compiled.backends import build_worker
from trocar_server.engine.compiled.backends.build_worker import Built, Job

_BUILDER = ThreadPoolExecutor(1, "builder")
"""One for all servers: torch 2.10 and 2.11 crash when a second thread of a process calls torch.export."""


def build_here(server: RunningServer) -> None:
    """Let a server build in this process, while its own thread waits: torch.export changes torch."""

    async def build(job: Job) -> Built:
        return await server.engine.owner.run(lambda: _BUILDER.submit(build_worker.build, job).result())

    server.engine.compiled.builder.build_apart = build
