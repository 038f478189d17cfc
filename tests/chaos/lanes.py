"""Chaos on threads of messages with several lanes: the same rules, and faults that hit one lane's log."""

from __future__ import annotations

from dataclasses import replace

from chaos import threads

DOMAIN = replace(threads.DOMAIN, lanes=2)
