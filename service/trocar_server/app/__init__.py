"""Server process: configuration, start, reload, stop."""

import sys

if sys.platform == "win32":
    # A plain sentence in the place of a missing `fcntl`: every command and `connect("local")` come by here.
    raise ImportError(
        "the server does not run on Windows: it needs file locks and process limits of POSIX; start it on "
        "Linux, for example in WSL 2 or in its container, and connect from here: the client runs on Windows"
    )
