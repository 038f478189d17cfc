"""Exclusive work per key and locks, on JetStream, with tokens that a sink can check. See docs/TOKENS.md."""

from bufstore.errors import SubmitUnknown, TokenBusy, TokenLost, TokenQueueFull
from bufstore.tokens.lock import Lock, Locks
from bufstore.tokens.model import Form, Policy, TokensConfig
from bufstore.tokens.task import Task
from bufstore.tokens.work import ExclusiveWork

__all__ = [
    "ExclusiveWork",
    "Form",
    "Lock",
    "Locks",
    "Policy",
    "SubmitUnknown",
    "Task",
    "TokenBusy",
    "TokenLost",
    "TokenQueueFull",
    "TokensConfig",
]
