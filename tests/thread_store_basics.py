"""Small things that the parts of the contract share."""

from __future__ import annotations

import uuid
from typing import Any

from bufstore.threads.model import Run


def fresh(what: str = "thread") -> str:
    """An id that nothing else has."""
    return f"{what}-{uuid.uuid4().hex}"


def run_of(thread_id: str, run_id: str | None = None, **fields: Any) -> Run:
    """A run of the thread."""
    return Run(run_id=run_id or f"run-of-{thread_id}", thread_id=thread_id, **fields)
