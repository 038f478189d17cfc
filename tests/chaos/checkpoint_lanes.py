"""Chaos on LangGraph's checkpoints with several lanes: the same rules, and faults that hit one lane's log."""

from __future__ import annotations

from dataclasses import replace

from chaos import checkpoints

DOMAIN = replace(checkpoints.DOMAIN, lanes=2)
