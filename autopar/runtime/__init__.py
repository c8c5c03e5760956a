"""What generated programs call: communicators and mesh-independent random numbers."""

from __future__ import annotations

from autopar.runtime.communicator import Communicator, Pending, Transport
from autopar.runtime.processes import announce, connect, join
from autopar.runtime.virtual import VirtualWorld

__all__ = ["Communicator", "Pending", "Transport", "VirtualWorld", "announce", "connect", "join"]
