"""Operator forms of the collectives, for backends that run graphs rather than generated Python.

An operator knows its communicator by the name before the colon in its axis or layout argument,
as torch's own functional collectives know their process group.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx

from autopar.collectives import COLLECTIVES
from autopar.runtime.communicator import Communicator

__all__ = ["bind", "runnable"]

_OTHERS = ("shift", "uniform", "keep_mask")
_ALONE = ("nothing",)  # ask nothing of the communicator
_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_library: Any = torch.library.Library("autopar", "IMPL")  # type: ignore[no-untyped-call]


def _kernel(name: str, position: int) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        owner, _, rest = args[position].partition(":")
        args = (*args[:position], rest, *args[position + 1 :])
        found = getattr(_communicators[owner], name)(*args, **kwargs)
        # members of a bucket share memory, which a compiler that plans memory must not be told
        return [x.clone() for x in found] if isinstance(found, list) else found

    return run


def _alone(name: str) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(Communicator, name)(None, *args, **kwargs)

    return run


for _name in (*COLLECTIVES, *_OTHERS):
    _library.impl(_name, _kernel(_name, 1), "CompositeExplicitAutograd")
for _name in _ALONE:
    _library.impl(_name, _alone(_name), "CompositeExplicitAutograd")


def bind(gm: fx.GraphModule, comm: Communicator) -> fx.GraphModule:
    """A copy of `gm` whose collectives run on `comm`; it must be kept alive by the caller."""
    owner = f"c{id(comm)}"
    _communicators[owner] = comm
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, mapping))
    for node in mapping.values():
        parts = str(node.target).split(".")
        if parts[0] == "autopar" and parts[1] not in _ALONE:
            node.args = (node.args[0], f"{owner}:{node.args[1]}", *node.args[2:])
    return fx.GraphModule(torch.nn.Module(), graph)


def runnable(gm: fx.GraphModule, comm: Communicator) -> fx.GraphModule:
    """`gm`, which goes on showing its own graph, and runs on `comm` when it is called."""
    gm.forward = bind(gm, comm).forward
    return gm
