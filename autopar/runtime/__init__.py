"""What generated programs call: communicators, random numbers of any mesh, operators on lists."""

from __future__ import annotations

from autopar.compat import foreach
from autopar.runtime.communicator import Communicator
from autopar.runtime.processes import announce, connect, join, share
from autopar.runtime.transport import Pending, Transport
from autopar.runtime.virtual import VirtualWorld

__all__ = [
    "Communicator",
    "Pending",
    "Transport",
    "VirtualWorld",
    "announce",
    "connect",
    "foreach",
    "join",
    "share",
]
