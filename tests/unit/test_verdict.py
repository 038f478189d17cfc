"""What a failed flush means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.flush.verdict import Verdict, verdict, verdict_of_app
from bufstore.errors import (
    Closed,
    ConfigError,
    LogFull,
    NotFound,
    OutcomeUnknown,
    StepUnknown,
    StoreMisconfigured,
    StoreUnavailable,
)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, Verdict.RETRY),
        ("08006", Verdict.RETRY),
        ("40001", Verdict.RETRY),
        ("40P01", Verdict.RETRY),
        ("53100", Verdict.RETRY),
        ("53300", Verdict.RETRY),
        ("57014", Verdict.SHRINK),
        ("53200", Verdict.SHRINK),
        ("25P04", Verdict.SHRINK),
        ("25P03", Verdict.SHRINK),
        ("57P01", Verdict.RETRY),
        ("57P03", Verdict.RETRY),
        ("58030", Verdict.RETRY),
        ("", Verdict.RETRY),
        ("55P03", Verdict.LOCKED),
        ("XX000", Verdict.ISOLATE),
        ("P0001", Verdict.ISOLATE),
        ("54000", Verdict.ISOLATE),
        ("44000", Verdict.ISOLATE),
        ("21000", Verdict.ISOLATE),
        ("38001", Verdict.ISOLATE),
        ("99999", Verdict.ISOLATE),
        ("25P02", Verdict.ISOLATE),
        ("22P05", Verdict.POISON),
        ("22021", Verdict.POISON),
        ("23505", Verdict.POISON),
        ("23514", Verdict.POISON),
        ("28P01", Verdict.STOP),
        ("28000", Verdict.STOP),
        ("42P01", Verdict.DENIED),
        ("42501", Verdict.DENIED),
        ("3D000", Verdict.STOP),
        ("3F000", Verdict.DENIED),
        ("25006", Verdict.STOP),
        ("XX001", Verdict.STOP),
    ],
)
def test_the_table(state: str | None, expected: Verdict) -> None:
    assert verdict(state) is expected


@given(state=st.text(max_size=6))
def test_only_data_and_constraint_errors_may_ever_park(state: str) -> None:
    assert (verdict(state) is Verdict.POISON) == (state[:2] in ("22", "23"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StoreUnavailable("x"), Verdict.RETRY),
        (Closed("x"), Verdict.RETRY),
        (ConnectionRefusedError(), Verdict.RETRY),
        (TimeoutError(), Verdict.RETRY),
        (LogFull("x"), Verdict.RETRY),
        (OutcomeUnknown("t", "k"), Verdict.RETRY),
        (StepUnknown("x"), Verdict.RETRY),
        (MemoryError(), Verdict.SHRINK),
        (StoreMisconfigured("x"), Verdict.DENIED),
        (ConfigError("x"), Verdict.SUSPECT),
        (NotFound("x"), Verdict.SUSPECT),
        (KeyError("x"), Verdict.SUSPECT),
    ],
)
def test_what_an_apps_code_raises(error: Exception, expected: Verdict) -> None:
    assert verdict_of_app(error) is expected
