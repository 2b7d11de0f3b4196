"""Ready sinks: where a step's numbers go beside the run folder. Each imports its library when it is made, and not before.

::

    with bw.Monitor(model, sinks=[TensorBoard("runs/1")]):
        train()

A sink is any callable of ``(metrics, step)``; these are called on the monitor's own thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from bitwitness.config.values import nearest
from bitwitness.errors import UsageError
from bitwitness.files.shown import quoted

_TRAINING = ("training/*",)
_NAME = re.compile(r"[^a-zA-Z0-9_/. -]")


class _Selecting:
    """Passes on the numbers whose names match one of some globs.

    Parameters
    ----------
    only
        Globs of names (``training/*``, ``grad/*/l2``); all that is of the training as a whole by default.

    """

    def __init__(self, only: Sequence[str] = _TRAINING) -> None:
        self._only = tuple(only)

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Take a step's numbers."""
        chosen = {name: value for name, value in metrics.items() if any(fnmatchcase(name, g) for g in self._only)}
        if chosen:
            self._log(chosen, step)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoard(_Selecting):
    """Writes TensorBoard's event files (needs ``tensorboard``); ``folder`` as `torch.utils.tensorboard` takes it."""

    def __init__(self, folder: str = "runs", only: Sequence[str] = _TRAINING) -> None:
        super().__init__(only)
        self._writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandB(_Selecting):
    """Logs to Weights & Biases (needs ``wandb``): the run that is on, or one that is begun with ``settings``.

    Steps are a metric of their own, so that the script's own logging keeps its count.
    """

    def __init__(self, only: Sequence[str] = _TRAINING, **settings: Any) -> None:
        super().__init__(only)
        wandb = _library("wandb", "wandb")
        self._run = wandb.run or wandb.init(**settings)
        self._run.define_metric("bitwitness/step")
        self._run.define_metric("bitwitness/*", step_metric="bitwitness/step")

    def _log(self, metrics: dict[str, float], step: int) -> None:
        named = {f"bitwitness/{name}": value for name, value in metrics.items()}
        self._run.log({"bitwitness/step": step, **named})


class MLflow(_Selecting):
    """Logs to MLflow (needs ``mlflow`` or ``mlflow-skinny``): the run that is active, or a new one."""

    def __init__(self, only: Sequence[str] = _TRAINING, **settings: Any) -> None:
        super().__init__(only)
        self._mlflow = _library("mlflow", "mlflow-skinny")
        active = self._mlflow.active_run() or self._mlflow.start_run(**settings)
        self._run = active.info.run_id  # another thread has no active run

    def _log(self, metrics: dict[str, float], step: int) -> None:
        named = {_NAME.sub("_", name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run)


class Trackio(_Selecting):
    """Logs to trackio (needs ``trackio``), in a project of the given name."""

    def __init__(self, project: str = "bitwitness", only: Sequence[str] = _TRAINING, **settings: Any) -> None:
        super().__init__(only)
        self._run = _library("trackio", "trackio").init(project=project, **settings)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)


class Prometheus(_Selecting):
    """Shows the newest numbers to Prometheus (needs ``prometheus-client``).

    Parameters
    ----------
    port
        Where they can be scraped; None where something else serves the registry.
    only
        Globs of names.
    address
        Whom the port is open to: this machine alone by default.

    """

    def __init__(
        self,
        port: int | None = 9400,
        only: Sequence[str] = _TRAINING,
        *,
        address: str = "127.0.0.1",
        registry: Any = None,
    ) -> None:
        super().__init__(only)
        client = _library("prometheus_client", "prometheus-client")
        registry = registry or client.REGISTRY
        self._value = client.Gauge("bitwitness_value", "a number of the training", ["name"], registry=registry)
        self._step = client.Gauge("bitwitness_step", "the step that it is of", registry=registry)
        if port is not None:
            client.start_http_server(port, address, registry)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self._step.set(step)
        for name, value in metrics.items():
            self._value.labels(name).set(value)


_KNOWN: dict[str, Callable[[str | None], _Selecting]] = {
    "tensorboard": lambda where: TensorBoard(where or "runs"),
    "wandb": lambda where: WandB(**({} if where is None else {"project": where})),
    "mlflow": lambda where: MLflow(**({} if where is None else {"run_name": where})),
    "trackio": lambda where: Trackio(where or "bitwitness"),
    "prometheus": lambda where: Prometheus(_port(where)),
}


def sink_of(text: str) -> _Selecting:
    """Return a ready sink by its name on the command line: ``tensorboard=DIR``, ``wandb=PROJECT``, ``prometheus=PORT``.

    Raises
    ------
    UsageError
        If there is none of that name, or its library is missing.

    """
    name, _, where = text.partition("=")
    if name not in _KNOWN:
        raise UsageError(f"--sink {quoted(name)}: expected one of {', '.join(_KNOWN)}{nearest(name, list(_KNOWN))}")
    return _KNOWN[name](where or None)


def _port(text: str | None) -> int:
    if text is None:
        return 9400
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise UsageError(f"--sink prometheus={quoted(text)}: expected a port's number")
    return int(text)


def _library(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(f"this sink needs {package}, which is not installed here: pip install {package}") from error
