"""The package's own log lines, in apps whose logging is not as it should be."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bufstore
from bufstore.log_lines import LogLines

NAME = "bufstore.a_module"


class Kept(logging.Handler):
    """Keeps records; `fault` is raised for each."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._fault = fault

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if self._fault is not None:
            raise self._fault


@pytest.fixture
def handler() -> Iterator[Kept]:
    kept, logger = Kept(), logging.getLogger(NAME)
    logger.addHandler(kept)
    before, logger.level, logger.propagate = logger.level, logging.INFO, False
    yield kept
    logger.removeHandler(kept)
    logger.level, logger.propagate = before, True


def test_a_line_has_its_fields_its_error_and_its_place(handler: Kept) -> None:
    lines = LogLines(NAME)
    lines.debug("too little to be told")
    lines.info("%s of %d", "one", 2, extra={"action": "told"})
    lines.log(logging.WARNING, "straight", stack_info=True)
    try:
        raise ValueError("why")
    except ValueError as e:
        lines.exception("failed")
        caught = e
    lines.error("failed before", exc_info=caught)
    told, straight, failed, before = handler.records
    assert (told.getMessage(), told.levelno, told.name) == ("one of 2", logging.INFO, NAME)
    assert told.__dict__["action"] == "told"
    assert straight.stack_info is not None
    assert [r.exc_info and r.exc_info[1] for r in (told, failed, before)] == [None, caught, caught]
    assert {(r.filename, r.funcName) for r in handler.records} == {
        (Path(__file__).name, "test_a_line_has_its_fields_its_error_and_its_place")
    }
    assert [r.lineno for r in handler.records] == sorted({r.lineno for r in handler.records})


def test_a_field_that_the_apps_records_have_already_is_ours(handler: Kept) -> None:
    factory = logging.getLogRecordFactory()

    def with_action(*args: Any, **named: Any) -> logging.LogRecord:
        record = factory(*args, **named)
        record.action = "-"
        return record

    logging.setLogRecordFactory(with_action)
    try:
        LogLines(NAME).warning("lost", extra={"action": "nats_lost"})
        LogLines(NAME).warning("plain")
    finally:
        logging.setLogRecordFactory(factory)
    assert [r.__dict__["action"] for r in handler.records] == ["nats_lost", "-"]


def no_factory(handler: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(*_: Any, **__: Any) -> logging.LogRecord:
        raise KeyError("a field")

    monkeypatch.setattr(logging, "_logRecordFactory", factory)


def no_filter(handler: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise KeyError("a field")

    monkeypatch.setattr(handler, "filter", refuse)


def no_handler(handler: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_fault", KeyError("a field"))


@pytest.mark.parametrize("broken", [no_factory, no_filter, no_handler])
@pytest.mark.parametrize("shown", [True, False])
def test_what_an_apps_logging_raises_ends_nothing(
    broken: Callable[[Kept, pytest.MonkeyPatch], None],
    shown: bool,
    handler: Kept,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: it ended the task that looks after the connection to NATS, say, and the store for good."""
    broken(handler, monkeypatch)
    monkeypatch.setattr(logging, "raiseExceptions", shown)
    LogLines(NAME).warning("the connection is lost", extra={"action": "nats_lost"})
    assert ("KeyError: 'a field'" in capsys.readouterr().err) is shown


def test_an_interruption_in_a_handler_gets_through(handler: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_fault", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        LogLines(NAME).warning("a line")


def test_every_module_logs_so() -> None:
    """No module writes to a logger of `logging` itself."""
    wrong = []
    for path in Path(bufstore.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _WRITES:
                wrong.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Assign) and "getLogger" in ast.unparse(node.value):
                wrong.append(f"{path.name}:{node.lineno}")
    assert not wrong


_WRITES = {f"logging.{level}" for level in ("debug", "info", "warning", "error", "exception", "critical", "log")}
