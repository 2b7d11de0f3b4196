"""What ``run.json`` says of a training's surroundings: some known at its start, some at its first steps."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from bitwitness.capture.step import StepRecord
from bitwitness.capture.structure import tensors_of
from bitwitness.session.reporter import Reporter
from bitwitness.stats import bit_hash
from bitwitness.store.environment import describe, hyperparameters

_BATCHES = 3  # first steps whose inputs are hashed: enough to see another order of the data


class Description:
    """Writes one root's surroundings, as far as there is a run folder.

    Parameters
    ----------
    reporter
        Knows the run folder.

    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._optimizers = WeakIdKeyDictionary()
        self._data: dict[str, str] = {}

    def started(self, root: nn.Module) -> None:
        """Describe what is there before the first step."""
        if self._reporter.records:
            self._reporter.describe(environment=describe(root))

    def stepped(self, optimizer: Optimizer) -> None:
        """Describe an optimizer at its first step."""
        if self._reporter.records and optimizer not in self._optimizers:
            self._optimizers[optimizer] = None
            self._reporter.describe(optimizers=hyperparameters(self._optimizers))

    def held(self, record: StepRecord) -> None:
        """Hash the inputs of the first steps."""
        if len(self._data) >= _BATCHES or not self._reporter.records or not record.forwards:
            return
        tensors = [t for forward in record.forwards for t in tensors_of((forward.args, forward.kwargs))]
        total = 0
        for tensor in tensors:
            total = (total * 31 + int(bit_hash(tensor))) & (1 << 64) - 1
        self._data[f"step {record.step}"] = f"{total:016x}"
        self._reporter.describe(data=self._data)
