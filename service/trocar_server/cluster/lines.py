"""Lines between a supervisor and its child process: JSON objects on the child's standard input and output.

    lines = ParentLines()                  # in the child
    settings = lines.read()
    lines.write(ready="10.0.0.5:41873")

The end of the child's input is the request to stop: it also comes when the parent is killed.
"""

import json
import os
import sys
from contextlib import suppress
from threading import Lock
from typing import Any, TextIO


class ParentLines:
    """The child's end. What other code prints goes to standard error from here on.

    Args:
        source: Where lines come from; standard input when None.
    """

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = source or sys.stdin
        sys.stdout.flush()
        self._writing = Lock()
        self._target = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)

    def read(self) -> dict[str, Any] | None:
        """Wait for the next line; None at the end of the input."""
        line = self._source.readline()
        return decode(line) if line else None

    def write(self, **fields: Any) -> None:
        """Send a line, on any thread; no effect if the parent has gone."""
        with self._writing, suppress(OSError, ValueError):
            self._target.write(encode(fields))


def encode(fields: dict[str, Any]) -> str:
    """Return an object as a line."""
    return json.dumps(fields) + "\n"


def decode(line: str) -> dict[str, Any]:
    """Return the object of a line."""
    fields: dict[str, Any] = json.loads(line)
    return fields
