"""How every command runs: its event loop, its logs, its errors as one line and an exit code."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import IO, Any, TypeVar

import click
import msgspec

from bufstore.errors import BufstoreError
from bufstore.log_lines import LogLines
from bufstore.printable import printable
from bufstore.spark.worker_errors import cause_in, told_in

T = TypeVar("T")

_log = LogLines(__name__)

#: The exit code when something is lost, differs, was not imported, or is worth a look.
EXIT_WRONG = 1
#: The exit code for wrong usage or configuration, or a server that cannot be reached (click's own code for usage).
EXIT_UNUSABLE = 2
_EXIT_INTERRUPTED = 130
#: Whose errors say that a job could not be run as asked: a master, a path, a file system.
_SPARK = frozenset(("pyspark", "py4j"))


#: A position in the log, or the number of a row: no more than a bigint holds.
POSITION = click.IntRange(0, 2**63 - 1)
#: A limit on how many items a command lists: no more than a list may hold.
COUNT = click.IntRange(1, 2**31 - 1)
#: The largest number that `Finite` accepts: as seconds, more than anything takes, and few enough for every clock.
_MOST = 1e10


class Finite(click.FloatRange):
    """A number in a range that is not NaN, which click lets pass, and not too large for a clock."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not abs(number) <= _MOST:
            self.fail(f"{value} is not a number of at most {_MOST:g}.", param, ctx)
        return number


class Time(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """A time in ISO format; without an offset from UTC, it is in this machine's time zone."""

    name = "time"
    _what = "not a time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is {self._what} like 2026-01-31T12:00:00+01:00.", param, ctx)


class Failure(click.ClickException):
    """Ends the command with one line on standard error, and with --json one object on standard output (`Problem`)."""

    exit_code = EXIT_UNUSABLE

    def __init__(self, message: str, kind: str = "Failure") -> None:
        super().__init__(message)
        self.kind = kind


class Interrupted(Failure):
    """Ends a command that Ctrl-C has interrupted."""

    exit_code = _EXIT_INTERRUPTED

    def __init__(self) -> None:
        super().__init__("interrupted", "Interrupted")

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, file, err=True)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints when a command fails."""

    #: The exit code.
    code: int
    #: The name of the error (`bufstore.errors`), or "Usage".
    error: str
    message: str


class Commands(click.Group):
    """A group of commands. A command that fails with --json says so in JSON as well."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as e:
            if ctx.meta[_AS_JSON]:
                kind = e.kind if isinstance(e, Failure) else "Usage"
                problem = Problem(code=e.exit_code, error=kind, message=e.format_message())
                with suppress(OSError):  # the error may be that nothing can be written there
                    click.echo(msgspec.json.encode(problem))
            raise


_AS_JSON = f"{__name__}.as_json"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on an event loop of its own, uvloop's if that is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def reporting_errors(command: Callable[..., T]) -> Callable[..., T]:
    """Decorate a command: an error of ours, of a file or of Spark becomes one line, Ctrl-C one word.

    A bug keeps its traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> T:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise Interrupted from None
        except BrokenPipeError:  # whoever read our output has left; click ends without a word
            raise
        except (BufstoreError, BaseExceptionGroup) as e:
            error = _ours(e)
            if error is None:
                raise
            _log.debug("the command failed", exc_info=e)
            raise Failure(printable(_first_line(error)), type(error).__name__) from None
        except Exception as e:
            if not isinstance(e, OSError) and type(e).__module__.partition(".")[0] not in _SPARK:
                raise
            _log.debug("the command failed", exc_info=e)
            if (told := told_in(e)) is not None:
                raise Failure(printable(told.text), told.name) from None
            said = printable(cause_in(e) or _first_line(e))
            raise Failure(f"{type(e).__name__}: {said}", type(e).__name__) from None

    return wrapped


def _ours(error: BaseException) -> BufstoreError | None:
    """Return the error if it is ours, or the first error of a group in which all are ours; otherwise None."""
    if isinstance(error, BufstoreError):
        return error
    if isinstance(error, BaseExceptionGroup):
        ours, others = error.split(BufstoreError)
        if ours is not None and others is None:
            return _ours(ours.exceptions[0])
    return None


def _first_line(error: Exception) -> str:
    # Further lines hold details (the end of a server's log, say); -vv shows them.
    return (str(error) or type(error).__name__).splitlines()[0]


def configure_logs(verbose: int) -> None:
    """Send logs to standard error: only our errors, with -v also what happens, with -vv everything."""
    level = (logging.ERROR, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    # When Postgres or NATS is away, these loggers only repeat what bufstore says itself before it goes on.
    for name in ("psycopg", "psycopg.pool", "nats", "asyncio"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose > 1 else logging.CRITICAL)
