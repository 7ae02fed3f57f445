"""The page of a server, served by a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self

from trocar._extras import need
from trocar._page.serving import PageAddress, serve_page

if TYPE_CHECKING:
    from types import TracebackType

    from trocar._transport.channel import ConnectOptions

_STOP_TIMEOUT_S = 60.0


class Page:
    """A page of a server in this process; open it at `url`, in a browser on this machine.

        page = client.page()
        page.url               # 'http://127.0.0.1:40123/'
        page.close()

    The page needs no token to be read; its calls do, where the server asks for one.

    Args:
        options: Connection to the server.
        address: Where the page listens.

    Raises:
        MissingExtraError: The extra `page` is not installed.
        OSError: The port cannot be opened.
    """

    def __init__(self, options: ConnectOptions, address: PageAddress) -> None:
        need("a page", "page", "hypercorn")
        self._options, self._address = options, address
        self._url: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="trocar-page", daemon=True)
        self._thread.start()
        self.url: str = self._url.result()
        """Where the page is."""

    def close(self) -> None:
        """Stop serving the page; what it asked for ends."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Page({self.url!r})"

    def _repr_html_(self) -> str:
        return f'<a href="{self.url}" target="_blank" rel="noopener">{self.url}</a>'

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(
                serve_page(self._options, self._address, self._url.set_result, self._wait)
            )
        except BaseException as error:
            if self._url.done():
                raise
            self._url.set_exception(error)
        finally:
            self._loop.close()

    async def _wait(self) -> None:
        await self._stopped.wait()
