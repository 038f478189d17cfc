"""The advice for a stream that differs from its configuration."""

from __future__ import annotations

import pytest

from bufstore import ConfigDrift
from bufstore.jetstream.drift import check


@pytest.mark.parametrize(
    ("field", "way_out"),
    [
        ("max_bytes", "Change it on the server (`nats stream edit S`) or in the configuration (LogConfig)."),
        # Running processes know the number of replicas from their configuration, and would go on without proofs.
        (
            "num_replicas",
            "Change it on the server (`nats stream edit S` while no process uses it, see docs/OPERATIONS.md) or in the "
            "configuration (LogConfig).",
        ),
    ],
)
def test_the_way_out_of_a_difference_is_safe(field: str, way_out: str) -> None:
    check("stream S", {field: 1}, {field: 1}, "LogConfig", "nats stream edit S")
    with pytest.raises(ConfigDrift) as caught:
        check("stream S", {field: 3}, {field: 1}, "LogConfig", "nats stream edit S")
    assert caught.value.way_out == way_out


def test_a_difference_with_only_one_way_out_names_that_one() -> None:
    with pytest.raises(ConfigDrift) as caught:
        check("consumer C", {"name": "C"}, {"name": "D"}, "", "nats consumer rm S C", way_out="Remove it.")
    assert caught.value.way_out == "Remove it."
