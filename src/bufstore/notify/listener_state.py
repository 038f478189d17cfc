"""The life of a shared listener, as a table. No I/O.

    IDLE ──wanted──> STARTING ──started──> RUNNING ──empty──> STOPPING ──stopped──> IDLE
                        └──────failed──────────────────────────────────────────────> IDLE

A lock guards every step, so a step that is not in the table cannot happen; if it does, it is a bug and raises.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a listener is."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class Step(enum.Enum):
    """What happens to it."""

    WANTED = "wanted"
    STARTED = "started"
    FAILED = "failed"
    EMPTY = "empty"
    #: The server was told, or could not be: either way nothing that it still sends is heard.
    STOPPED = "stopped"


NEXT: dict[tuple[State, Step], State] = {
    (State.IDLE, Step.WANTED): State.STARTING,
    (State.STARTING, Step.STARTED): State.RUNNING,
    (State.STARTING, Step.FAILED): State.IDLE,
    (State.RUNNING, Step.EMPTY): State.STOPPING,
    (State.STOPPING, Step.STOPPED): State.IDLE,
}


def after(state: State, step: Step) -> State:
    """The state that follows. Raises RuntimeError for a step that the table does not have."""
    try:
        return NEXT[state, step]
    except KeyError:
        raise RuntimeError(f"a listener that is {state.value} cannot be {step.value}") from None
