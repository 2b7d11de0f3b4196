"""Are the numbers of your training run true.

    import bitwitness as bw

    with bw.Guard(model, optimizer, out="run/"):
        train()

All public names are in ``__all__``; each is imported when it is first used, so that ``bitwitness --help`` does not wait for
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bitwitness.version import __version__

if TYPE_CHECKING:
    from bitwitness import ascend, checkpoint, testing
    from bitwitness.comparison.recordings import compare
    from bitwitness.config import Config
    from bitwitness.errors import BitwitnessError, ConfigError, TrainingStopped, UsageError
    from bitwitness.finding import Cause, Finding, Note, Verdict
    from bitwitness.guard.guard import Guard
    from bitwitness.guard.tracer import NonfiniteTracer, trace_nonfinite
    from bitwitness.monitor.monitor import Monitor
    from bitwitness.record.recorder import Recorder
    from bitwitness.record.saved import save
    from bitwitness.session.instrument import Instrument
    from bitwitness.session.session import Session
    from bitwitness.site import Site
    from bitwitness.store.folder import Run
    from bitwitness.trial.verification import Verification
    from bitwitness.trial.verify import verify_op

__all__ = [
    "BitwitnessError",
    "Cause",
    "Config",
    "ConfigError",
    "Finding",
    "Guard",
    "Instrument",
    "Monitor",
    "NonfiniteTracer",
    "Note",
    "Recorder",
    "Run",
    "Session",
    "Site",
    "TrainingStopped",
    "UsageError",
    "Verdict",
    "Verification",
    "__version__",
    "ascend",
    "checkpoint",
    "compare",
    "save",
    "testing",
    "trace_nonfinite",
    "verify_op",
]

_MODULES = ("ascend", "checkpoint", "testing")
_HOMES = {
    "BitwitnessError": "errors",
    "Cause": "finding",
    "Config": "config",
    "ConfigError": "errors",
    "Finding": "finding",
    "Guard": "guard.guard",
    "Instrument": "session.instrument",
    "Monitor": "monitor.monitor",
    "NonfiniteTracer": "guard.tracer",
    "Note": "finding",
    "Recorder": "record.recorder",
    "Run": "store.folder",
    "Session": "session.session",
    "Site": "site",
    "TrainingStopped": "errors",
    "UsageError": "errors",
    "Verdict": "finding",
    "Verification": "trial.verification",
    "compare": "comparison.recordings",
    "save": "record.saved",
    "trace_nonfinite": "guard.tracer",
    "verify_op": "trial.verify",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"bitwitness.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'bitwitness' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"bitwitness.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
