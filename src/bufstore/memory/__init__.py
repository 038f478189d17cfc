"""In memory: for users' tests, and as the oracle of ours."""

from bufstore.memory.server import MemoryNats
from bufstore.memory.store import MemoryThreadStore

__all__ = ["MemoryNats", "MemoryThreadStore"]
