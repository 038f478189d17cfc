"""LangGraph's savers, with the time of their calls. Apart from the others, whose processes do not load LangGraph."""

from __future__ import annotations

from bench.langgraph_savers import MemorySaver, OurSaver, PlainSaver
from bench.profile.timed import Timed


class TimedSaver(Timed, OurSaver):
    """Our saver."""


class TimedPlainSaver(Timed, PlainSaver):
    """LangGraph's own."""


class TimedMemorySaver(Timed, MemorySaver):
    """LangGraph without anything durable."""
