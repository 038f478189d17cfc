"""A request for many subjects is cut so that a server takes each part."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from bufstore.jetstream.portions import SUBJECTS_MAX, portions

SUBJECTS = st.lists(st.text("ab.", min_size=1, max_size=30), max_size=60)


@given(SUBJECTS, st.integers(1, 200))
@example(["a"] * (2 * SUBJECTS_MAX + 1), 1 << 20)
def test_each_part_fits_and_nothing_is_left_out(subjects: list[str], bytes_max: int) -> None:
    parts = [*portions(subjects, bytes_max)]
    assert [subject for part in parts for subject in part] == subjects
    for part in parts:
        assert 1 <= len(part) <= SUBJECTS_MAX
        assert len(part) == 1 or len(json.dumps([*part])) - len("[]") <= bytes_max
    for part, after in pairwise(parts):  # none is smaller than it has to be
        assert len(part) == SUBJECTS_MAX or len(json.dumps([*part, after[0]])) + 4 > bytes_max
