"""Tools for testing what is built on bufstore."""

from bufstore.testing.fault_proxy import FaultProxy, Flow

__all__ = ["FaultProxy", "Flow"]
