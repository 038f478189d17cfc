"""The log and the ledger in memory: for users' tests, and as the oracle of ours."""

from bufstore.memory.server import MemoryNats

__all__ = ["MemoryNats"]
