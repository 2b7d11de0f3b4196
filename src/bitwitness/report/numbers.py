"""The numbers that a run left, whoever wrote them: its monitored series or, without these, what its recording tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bitwitness.errors import UsageError
from bitwitness.store.folder import Run
from bitwitness.store.monitored import is_monitored, monitored_ranks, read_series

Ints = npt.NDArray[np.int64]

COLUMNS = ("step", "kind", "name", "metric", "value", "count", "nan", "inf", "min", "max", "l2")
_MOST_RANKS = 32
_MOST_TABLES = 2000  # steps of all ranks that are read of a recording: each holds thousands of rows
_KINDS = {
    ("module", "forward"): "activation",
    ("module", "backward"): "activation_grad",
    ("gradient", "grad"): "grad",
    ("parameter", "param"): "param",
}


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there is: the steps of all ranks, ascending; names of the kind that has most; kinds."""

    steps: Ints
    names: int
    kinds: int


@dataclass(slots=True)
class Numbers:
    """A run's numbers, rank by rank.

    Attributes
    ----------
    run
        The run.
    named
        Ranks that its verdicts and findings name: they are drawn, however many there are.
    problems
        What could not be read.
    thinned
        What was not drawn because there is too much of it.

    """

    run: Run
    named: Sequence[int] = ()
    problems: list[str] = field(default_factory=list)
    thinned: list[str] = field(default_factory=list)
    _held: dict[int, pa.Table] = field(default_factory=dict)

    @property
    def monitored(self) -> bool:
        """Whether the run was monitored."""
        return is_monitored(self.run.path)

    def ranks(self) -> list[int]:
        """Return the ranks that have numbers; of very many those that are named, and the first."""
        if self.monitored:
            found = monitored_ranks(self.run.path)
        else:
            found = [rank for rank in self.run.ranks() if self.run.steps(rank)]
        if len(found) <= _MOST_RANKS:
            return found
        said = f"of {len(found)} ranks {_MOST_RANKS} are drawn: those that verdicts and findings name, and the first"
        self.thinned += [said] if said not in self.thinned else []
        return sorted(sorted(found, key=lambda rank: rank not in self.named)[:_MOST_RANKS])

    def extent(self) -> Extent:
        """Return how much there is, without reading the numbers of a monitored run."""
        steps: list[Ints] = []
        named: set[tuple[str, str]] = set()
        for rank in self.ranks() if self.monitored else ():
            table, _ = read_series(self.run.path, rank, columns=("step", "kind", "name"))
            _take(table, steps, named)
        for _, table in () if self.monitored else self.tables():
            _take(table, steps, named)
        kinds = [kind for kind, _ in named if kind != "training"]
        most = max((kinds.count(kind) for kind in set(kinds)), default=0)
        return Extent(np.unique(np.concatenate(steps)) if steps else np.array([], np.int64), most, len(set(kinds)))

    def tables(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield each rank's rows with `COLUMNS`: one rank's at a time are in memory."""
        ranks = self.ranks()
        for rank in ranks:
            if self.monitored:
                table, problems = read_series(self.run.path, rank, columns=COLUMNS)
                for problem in problems:
                    self._note(problem)
            else:
                table = self._recorded(rank, _MOST_TABLES // max(len(ranks), 1))
            if table.num_rows:
                yield rank, table.unify_dictionaries().combine_chunks()

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _recorded(self, rank: int, most: int) -> pa.Table:
        """Return what a recording tells of one rank: little beside the recording, which is read once."""
        if rank not in self._held:
            self._held[rank] = self._read(rank, most)
        return self._held[rank]

    def _read(self, rank: int, most: int) -> pa.Table:
        steps = self.run.steps(rank)
        every = -(-len(steps) // max(most, 1))
        if every > 1:
            self.thinned.append(f"of {len(steps)} recorded steps of rank {rank} one in {every} was read for the charts")
        tables = []
        for step in steps[::every]:
            try:
                tables.append(_as_series(self.run.rows(step=step, rank=rank)))
            except UsageError as error:
                self._note(str(error))
        return pa.concat_tables(tables) if tables else pa.table({name: [] for name in COLUMNS})


def _take(table: pa.Table, steps: list[Ints], named: set[tuple[str, str]]) -> None:
    steps.append(np.unique(np.asarray(table.column("step"), dtype=np.int64)))
    pairs = table.select(["kind", "name"]).group_by(["kind", "name"]).aggregate([]).to_pydict()
    named.update(zip(map(str, pairs["kind"]), map(str, pairs["name"]), strict=True))


def _as_series(rows: pa.Table) -> pa.Table:
    """Return a recording's rows of modules and parameters as those of a monitored run."""
    kinds, phases, slots = (rows.column(name).cast(pa.string()) for name in ("kind", "phase", "slot"))
    told = pa.nulls(rows.num_rows, pa.string())
    for (kind, phase), series in _KINDS.items():
        told = pc.if_else(pc.and_(pc.equal(kinds, kind), pc.equal(phases, phase)), series, told)
    result = pc.or_(pc.starts_with(slots, "out"), pc.starts_with(slots, "grad_in"))
    kept = pc.and_(pc.is_valid(told), pc.or_(result, pc.not_equal(kinds, "module")))
    kept = pc.fill_null(kept, fill_value=False)
    rows, told = rows.filter(kept), told.filter(kept)
    module, op = (rows.column(name).cast(pa.string()) for name in ("module", "op"))
    inner = pc.if_else(pc.equal(module, "."), op, pc.binary_join_element_wise(module, op, "."))
    names = pc.if_else(pc.is_in(told, pa.array(["activation", "activation_grad"])), module, inner)
    nothing = pa.nulls(rows.num_rows, pa.string())
    columns = {
        "step": rows.column("step"),
        "kind": told,
        "name": names,
        "metric": nothing,
        "value": pa.nulls(rows.num_rows, pa.float64()),
        "count": rows.column("count"),
        "nan": pc.fill_null(rows.column("nan"), 0),
        "inf": pc.add(pc.fill_null(rows.column("pos_inf"), 0), pc.fill_null(rows.column("neg_inf"), 0)),
        "min": rows.column("min"),
        "max": rows.column("max"),
        "l2": rows.column("l2"),
    }
    table = pa.table(columns)
    for name in ("kind", "name", "metric"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pc.dictionary_encode(table.column(name)))
    return table
