"""The command line of bufstore; `bufstore --help` lists the commands. Needs the `cli` extra."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

#: The packages that the extra installs; where one is missing, a sentence takes the place of a traceback.
_EXTRA = {"click", "rich"}


def main() -> None:
    """The entry point ``bufstore``."""
    _have_standard_streams()
    try:
        _main()
    except KeyboardInterrupt:  # while the modules are loaded, or behind the command
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


def _main() -> None:
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


def _have_standard_streams() -> None:
    """Open those that whoever started us has closed: a socket would get the number, at whose close uvloop aborts."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open
