"""LangGraph's savers with timed calls. In a module of its own, so that other contestants do not load LangGraph."""

from __future__ import annotations

from bench.langgraph_savers import MemorySaver, OurSaver, PlainSaver
from bench.profile.timed import Timed


class TimedSaver(Timed, OurSaver):
    """Our saver."""


class TimedPlainSaver(Timed, PlainSaver):
    """LangGraph's own saver for Postgres."""


class TimedMemorySaver(Timed, MemorySaver):
    """LangGraph without durability."""
