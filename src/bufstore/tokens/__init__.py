"""Exclusive work per key and locks, on JetStream, with tokens that a sink can check. See docs/TOKENS.md."""

from typing import TYPE_CHECKING

from bufstore import _lazy

if TYPE_CHECKING:
    from bufstore.errors import SubmitUnknown as SubmitUnknown
    from bufstore.errors import TokenBusy as TokenBusy
    from bufstore.errors import TokenLost as TokenLost
    from bufstore.errors import TokenQueueFull as TokenQueueFull
    from bufstore.tokens.lock import Lock as Lock
    from bufstore.tokens.lock import Locks as Locks
    from bufstore.tokens.model import Holder as Holder
    from bufstore.tokens.model import Policy as Policy
    from bufstore.tokens.model import Statistics as Statistics
    from bufstore.tokens.model import Storage as Storage
    from bufstore.tokens.model import TokensConfig as TokensConfig
    from bufstore.tokens.task import Task as Task
    from bufstore.tokens.work import ExclusiveWork as ExclusiveWork
else:
    __all__, __getattr__, __dir__ = _lazy.names(
        __name__,
        {
            "bufstore.errors": ("SubmitUnknown", "TokenBusy", "TokenLost", "TokenQueueFull"),
            "bufstore.tokens.lock": ("Lock", "Locks"),
            "bufstore.tokens.model": ("Holder", "Policy", "Statistics", "Storage", "TokensConfig"),
            "bufstore.tokens.task": ("Task",),
            "bufstore.tokens.work": ("ExclusiveWork",),
        },
    )
