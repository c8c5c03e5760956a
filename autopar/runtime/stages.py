"""Runs the instructions of a rank of a pipeline inside autograd."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.layout import Layout, Mesh
from autopar.pipeline import Instruction, Span
from autopar.runtime.communicator import Communicator
from autopar.runtime.microbatches import Microbatches, Values, add, side_by_side
from autopar.runtime.transport import Call, Pending
from autopar.schedule import Stages
from autopar.sizes import at_place

__all__ = ["Pipeline"]


class Pipeline(Microbatches):
    """A step over microbatches on a rank of a pipeline.

    Args:
        stages: what this rank runs, with the sizes of this rank in its joins.
        place: (coordinate) -> number of the place whose sizes hold there.
        others: see `Microbatches`.
    """

    def __init__(
        self,
        stages: Stages,
        place: Callable[[Mapping[str, int]], int],
        functions: Mapping[str, Callable[..., Any]],
        mesh: Mesh,
        layouts: Sequence[Layout | None],
        wrap: Callable[[int, Tensor], Tensor],
        comm: Communicator,
        device: torch.device,
    ) -> None:
        super().__init__(stages.step, functions, mesh, layouts, wrap, comm, device)
        self.stages = stages
        self.places = [place(c.coordinate) for c in self.comms]
        self.place = place({**dict.fromkeys(mesh.names, 0), **comm.coordinate})
        self.list = stages.schedule.ranks[stages.rank]
        self.spans: list[Span] = []
        comm.transport.link(self.links())

    def forward(self, given: list[Tensor]) -> tuple[list[Tensor], Values]:
        """Results of all stages that this rank knows, and what `finish` takes."""
        step = self.step
        for comm in self.comms:
            comm.seed, comm.step = self.comm.seed, self.comm.step
        common: Values = dict(zip(step.placed, given, strict=True))
        tangent, dtype = step.tangent
        common[tangent] = torch.ones((), dtype=dtype, device=self.device)
        parts = [self.part(common, i) for i in range(len(self.comms))]
        self.each("count", parts, common, step.counted)
        common.update(self.call("start", self.comms[0], common))
        run = _Run(self, common, parts)
        for instruction in self.list:
            run.step(instruction)
        common.update(run.joined())
        self.move(common)
        common.update(self.call("end", self.comms[0], common))
        common.update(run.results())
        kept = {n: common[n] for n in step.takes["finish"] if n != tangent}
        nothing = torch.zeros((), device=self.device)
        return [common.get(n, nothing) for n in step.results], kept

    def links(self) -> list[tuple[int, int]]:
        """(from, to) of all ranks of the mesh between which anything is sent."""
        stages, mesh = self.stages, self.comm.mesh
        owners = stages.schedule.owners
        ends = {(a, b) for _, a, b in stages.moves}
        for instructions in stages.schedule.ranks:
            ends |= {(owners[i.stage], owners[i.peer]) for i in instructions if i.sends}
        every = map(mesh.coordinate, range(mesh.size))
        return [
            (mesh.rank({**at, "pp": a}), mesh.rank({**at, "pp": b}))
            for at in every
            if at["pp"] == 0
            for a, b in ends
        ]

    def peer(self, rank: int) -> int:
        """The rank of the mesh at a coordinate of the pipeline."""
        return self.comm.mesh.rank({**self.comm.coordinate, "pp": rank})

    def move(self, common: Values) -> None:
        """Send the sums that other ranks of the pipeline need, and receive what this one does."""
        here = self.stages.rank
        under_way: list[Pending] = []
        came: list[tuple[str, Pending]] = []
        for name, source, target in self.stages.moves:
            shape, dtype = self.stages.looks[name]
            call = Call("move", "pp", dtype, (), (name, source, target))
            if source == here:
                under_way.append(
                    self.comm.transport.start_send(common[name], self.peer(target), call)
                )
            elif target == here:
                like = torch.empty(at_place(shape, self.place), dtype=dtype, device=self.device)
                came.append(
                    (name, self.comm.transport.start_receive(like, self.peer(source), call))
                )
        for name, pending in came:
            common[name] = pending.wait()
        for sent in under_way:
            sent.wait()


class _Run:
    """The instructions of one step."""

    def __init__(self, owner: Pipeline, common: Values, parts: Sequence[Values]) -> None:
        self.owner, self.common = owner, common
        self.values: list[Values] = [dict(p) for p in parts]
        self.left = self.uses()
        self.coming: dict[tuple[str, int], Pending] = {}
        self.sent: list[Pending] = []
        step = owner.step
        self.totals: Values = {}
        self.pieces: dict[str, dict[int, Tensor]] = {
            name: {} for name in (*(j.result for j in step.summed if j.how == "gather"), *step.cut)
        }
        owner.spans = []

    def uses(self) -> list[Counter[str]]:
        """How often each value of each microbatch is taken on this rank."""
        found = [Counter[str]() for _ in self.values]
        for i in self.owner.list:
            found[max(i.microbatch, 0)].update(self.taken(i))
        return found

    def taken(self, i: Instruction) -> Sequence[str]:
        """The values that an instruction takes."""
        if i.sends:
            return self.owner.stages.messages[i.message[:3]]
        return self.owner.step.takes[f"{i.kind}{i.stage}"] if i.kind in "FBIW" else ()

    def step(self, i: Instruction) -> None:
        """Run an instruction."""
        if i.moves:
            self.communicate(i)
        elif i.kind != "REDUCE":
            self.compute(i)

    def communicate(self, i: Instruction) -> None:
        """Start a message."""
        owner, k = self.owner, i.microbatch
        direction, source, target, _ = i.message
        other = owner.peer(owner.stages.schedule.owners[i.peer])
        for name in owner.stages.messages[direction, source, target]:
            shape, dtype = owner.stages.looks[name]
            shape = at_place(shape, owner.places[k])
            call = Call(f"send_{direction}", "pp", dtype, tuple(shape), (name, source, target, k))
            transport = owner.comm.transport
            if i.sends:
                self.sent.append(transport.start_send(self.take(name, k), other, call))
            else:
                like = torch.empty(shape, dtype=dtype, device=owner.device)
                self.coming[name, k] = transport.start_receive(like, other, call)

    def take(self, name: str, k: int) -> Tensor:
        """A value for one use; it is let go after the last."""
        if (name, k) in self.coming:
            self.values[k][name] = self.coming.pop((name, k)).wait()
        own = self.values[k]
        if name not in own:
            return self.common[name]  # type: ignore[no-any-return]
        self.left[k][name] -= 1
        return own[name] if self.left[k][name] else own.pop(name)  # type: ignore[no-any-return]

    def compute(self, i: Instruction) -> None:
        """Run a function of a stage for a microbatch."""
        owner, k, name = self.owner, i.microbatch, f"{i.kind}{i.stage}"
        function = owner.functions.get(name)
        if function is None:
            return
        given = [self.take(n, k) for n in owner.step.takes[name]]
        begun = time.perf_counter()
        with torch.no_grad():
            found = function(owner.comms[k], owner.device, given)
        ended = time.perf_counter()
        owner.spans.append(Span(owner.stages.rank, i, begun, ended))
        for key, value in zip(owner.step.gives[name], found, strict=True):
            if self.left[k][key]:
                self.values[k][key] = value
            self.collect(key, value, k)

    def collect(self, key: str, value: Tensor, k: int) -> None:
        """Add a value up over microbatches, or keep it, where it is wanted after the schedule."""
        for join in self.owner.step.summed:
            if join.operand == key and join.how == "gather":
                self.pieces[join.result][k] = value
            elif join.operand == key:
                total = self.totals.get(join.result)
                self.totals[join.result] = (
                    value.clone() if total is None else add(total, value, join.how)
                )
        if key in self.owner.step.cut:
            self.pieces[key][k] = value

    def joined(self) -> Values:
        """What is joined over microbatches; all messages have come."""
        for pending in self.sent:
            pending.wait()
        for join in self.owner.step.summed:
            if join.how == "gather":
                rows = self.pieces[join.result]
                self.totals[join.result] = side_by_side(
                    [rows[k] for k in sorted(rows)], join.dim, join.outer
                )
        return self.totals

    def results(self) -> Values:
        """Results that microbatches cut, of the stages of this rank."""
        return {
            name: torch.cat([self.pieces[name][k] for k in sorted(self.pieces[name])], dim)
            for name, dim in self.owner.step.cut.items()
        }
