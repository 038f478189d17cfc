"""The objects that every part of a buffer works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from bufstore.buffer.domain import C, Domain, M, S
from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.ports.log import Log
from bufstore.buffer.ports.shared_state import SharedState
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig


@dataclass(frozen=True, kw_only=True)
class Parts(Generic[C, S, M]):
    """One log, the shared state beside it, the ledger behind it, and the domain that says what its entries mean."""

    domain: Domain[C, S, M]
    log: Log
    shared: SharedState
    ledger: Ledger
    subjects: Subjects
    config: BufferConfig


#: The parts of a buffer, for code that does not ask what entries mean.
AnyParts = Parts[Any, Any, Any]
