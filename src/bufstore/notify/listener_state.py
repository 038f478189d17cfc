"""The life of a shared listener, as a table. No I/O.

    IDLE ──wanted──> STARTING ──started──> RUNNING ──empty──> STOPPING ──stopped──> IDLE
                        └──────failed──────────────────────────────────────────────> IDLE

A lock guards every step, so a step that is not in the table cannot happen; if it does, it is a bug and raises.
"""

from __future__ import annotations

import enum


class ListenerState(enum.Enum):
    """The state of a listener."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class ListenerStep(enum.Enum):
    """What happens to a listener."""

    WANTED = "wanted"
    STARTED = "started"
    FAILED = "failed"
    EMPTY = "empty"
    #: The server was told, or could not be told: either way, what it still sends is not heard.
    STOPPED = "stopped"


NEXT: dict[tuple[ListenerState, ListenerStep], ListenerState] = {
    (ListenerState.IDLE, ListenerStep.WANTED): ListenerState.STARTING,
    (ListenerState.STARTING, ListenerStep.STARTED): ListenerState.RUNNING,
    (ListenerState.STARTING, ListenerStep.FAILED): ListenerState.IDLE,
    (ListenerState.RUNNING, ListenerStep.EMPTY): ListenerState.STOPPING,
    (ListenerState.STOPPING, ListenerStep.STOPPED): ListenerState.IDLE,
}


def after(state: ListenerState, step: ListenerStep) -> ListenerState:
    """Return the state that follows. Raises RuntimeError for a step that the table does not have."""
    try:
        return NEXT[state, step]
    except KeyError:
        raise RuntimeError(f"a listener that is {state.value} cannot be {step.value}") from None
