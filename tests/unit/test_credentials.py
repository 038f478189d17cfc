"""What credentials say of themselves (`bufstore.jetstream.credentials`)."""

from __future__ import annotations

import json
import os
import time
from base64 import urlsafe_b64encode
from typing import Any

import pytest

from bufstore.jetstream.credentials import expiry


def _credentials(claims: dict[str, Any]) -> str:
    jwt = ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, claims, {}))
    nkeys = pytest.importorskip("nkeys")
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode()
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def test_credentials_say_when_they_expired() -> None:
    assert expiry(_credentials({"exp": 1_700_000_000})) == (
        "; the JWT in NatsConfig.credentials expired at 2023-11-14T22:13:20Z: renew it"
    )


@pytest.mark.parametrize(
    "claims", [{}, {"exp": 0}, {"exp": -5}, {"exp": "soon"}, {"exp": 1e30}, {"exp": None}], ids=str
)
def test_nothing_is_said_of_credentials_that_do_not_expire(claims: dict[str, Any]) -> None:
    """Regression: 0, which to NATS means never, was said to be over since 1970."""
    assert expiry(_credentials(claims)) == ""
    assert expiry(_credentials({"exp": time.time() + 60})) == ""
    assert expiry("/no/such.creds") == expiry(None) == ""
