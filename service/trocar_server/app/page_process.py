"""The page's process: the client's command `trocar page`, started with the server and ended with it.

    page = PageProcess(config)        # refuses what cannot work
    start_server(..., own_socket=page.socket)
    await page.start(log)
    page.url                          # http://127.0.0.1:8080/
    await page.stop()

The page belongs to the client's package, which the server does not import. The process speaks to the server
over a Unix socket in a folder of this user alone, so it needs neither a certificate nor a name of the server.
It gets no token: those of the page's users decide.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from trocar_api.reasons import ErrorReason
from trocar_server.app.access import check_page_address
from trocar_server.config import PageConfig, ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.rpc.listen.unix_socket import target_of
from trocar_server.storage.temporary_folder import TemporaryFolder

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_MAX_LINE_BYTES = 4096
_NEEDED = ("trocar", "hypercorn")
_CREDENTIALS = "TROCAR_"
"""How environment variables begin that would give the process a server, a token or a profile of this user."""


class PageProcess:
    """The page of a server; belongs to one event loop.

    Args:
        config: The server's configuration, with the page enabled.

    Attributes:
        socket: Where the server has to listen for the process.
        url: Where the page is; empty until it has started.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a library is missing, or the configuration does not fit.
    """

    def __init__(self, config: ServerConfig) -> None:
        _check(config)
        self._config = config.page
        self._folder = TemporaryFolder()  # no other user can enter it, and nothing stays after a kill
        self.socket = self._folder.path / "socket"
        self.url = ""
        self._port = self._config.port
        self._process: Process | None = None
        self._reading: asyncio.Task[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None where none runs."""
        return self._process.pid if self._process is not None else None

    async def start(self, log: Any) -> None:
        """Start the process; it is started again whenever it ends before `stop`.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the page cannot be served; says why.
        """
        try:
            await self._start()
        except ServiceError:
            await self.stop()
            raise
        log.info("page", url=self.url)
        self._watching = asyncio.create_task(self._keep(log))

    async def stop(self) -> None:
        """End the process and remove its folder; no effect once stopped."""
        if self._watching is not None:
            self._watching.cancel()
            # However it ended: what stops after the page, trainers are saved then, must not depend on it.
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._end()
        self._folder.cleanup()

    async def _keep(self, log: Any) -> None:
        """Start the process again when it has ended, with a longer pause each time that it does not start."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._process is not None:
                code = await self._process.wait()
                await self._end()
                log.warning("page ended", code=code, advice="it is started again")
            await asyncio.sleep(pause_s)
            try:
                await self._start()
            except ServiceError as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                log.error("page not started", problem=error.message, next_attempt_s=pause_s)
            else:
                pause_s = _FIRST_PAUSE_S
                log.info("page", url=self.url)

    async def _start(self) -> None:
        self._process = process = await self._begun()
        assert process.stdout is not None
        assert process.stderr is not None
        self._reading = asyncio.create_task(_last_line(process.stderr))
        line = b""
        with suppress(TimeoutError, ValueError):
            line = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
        try:
            self.url = str(json.loads(line)["url"])
        except (ValueError, KeyError, TypeError):
            why = _message(await self._end())
            place = f"{self._config.host}:{self._port}"
            raise _refused(f"the page cannot be served on {place}: {why}") from None
        self._port = urlsplit(self.url).port or self._port  # links keep working when it is started again

    async def _begun(self) -> Process:
        """Begin a process.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the machine has no room for one now.
        """
        fixed = ("-P", "-m", "trocar", "page", "--server", target_of(self.socket))
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *(*fixed, "--json", "--stop-with-stdin"),
                *_options(self._config, self._port),
                stdin=PIPE,  # it ends with this process, however that ends
                stdout=PIPE,
                stderr=PIPE,
                limit=_MAX_LINE_BYTES,
                env={key: value for key, value in os.environ.items() if not key.startswith(_CREDENTIALS)},
                start_new_session=True,  # Ctrl-C in the terminal is for the server
            )
        except OSError as error:
            raise _refused(f"the page's process cannot be started: {error.strerror or error}") from None

    async def _end(self) -> bytes:
        """End the process, if one runs; return the last line that it wrote to its standard error."""
        process, self._process = self._process, None
        if process is None or self._reading is None:
            return b""
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        return await self._reading


def _check(config: ServerConfig) -> None:
    check_page_address(config.page)
    for name in _NEEDED:
        if find_spec(name) is None:
            raise _refused(f'the page needs {name}: pip install "trocar[page]", or do without it')
    if config.tls_client_ca is not None:
        raise _refused(
            "the page cannot be served where clients need certificates (tls_client_ca): a browser has none "
            "to pass on. Use `trocar page --cert FILE --key FILE` with a certificate that its users may share"
        )


def _options(config: PageConfig, port: int) -> list[str]:
    words = ["--host", config.host, "--port", str(port)]
    if config.tls_cert is not None and config.tls_key is not None:
        files = (config.tls_cert.expanduser(), config.tls_key.expanduser())
        words += ["--page-cert", str(files[0]), "--page-key", str(files[1])]
    return [*words, "--insecure"] if config.insecure else words


async def _last_line(stream: asyncio.StreamReader) -> bytes:
    """Read to the end; return the last line, at most `_MAX_LINE_BYTES` of it."""
    last = b""
    while part := await stream.read(_MAX_LINE_BYTES):
        last = (last + part)[-_MAX_LINE_BYTES:]
    return (last.strip().splitlines() or [b""])[-1]


def _message(line: bytes) -> str:
    """Message of a command that failed with `--json`."""
    try:
        return str(json.loads(line)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return line.decode(errors="replace") or "it does not answer"


def _refused(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
