"""The command line of bufstore; `bufstore --help` lists the commands. Needs the `cli` extra."""

from __future__ import annotations

import io
import sys
from contextlib import suppress

#: The packages that the extra installs; where one is missing, a sentence takes the place of a traceback.
_EXTRA = {"click", "rich"}


def main() -> None:
    """The entry point ``bufstore``."""
    try:
        from bufstore.cli.app import app
    except ModuleNotFoundError as e:
        if e.name not in _EXTRA:
            raise
        sys.stderr.write(f"{e.name} is not installed: the command line needs `pip install 'bufstore[cli]'`\n")
        raise SystemExit(2) from None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An encoding that lacks a character must not end a command. A stream that an app has put here may refuse.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    app(prog_name="bufstore")
