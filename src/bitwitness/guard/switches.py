"""Sensors that are asked one by one; what fails is turned off and named, and the training goes on."""

from __future__ import annotations

from collections.abc import Callable

from bitwitness.capture.root import RootTap
from bitwitness.finding import Finding
from bitwitness.session.reporter import Reporter


class Switches:
    """Asks sensors; one that fails is off from then on, and named.

    Parameters
    ----------
    root
        Whose step it is when one fails.
    reporter
        Told of it.

    """

    def __init__(self, root: RootTap, reporter: Reporter) -> None:
        self._root = root
        self._reporter = reporter
        self.off: dict[str, str] = {}
        """Sensors that were turned off, and why."""

    def ask(self, name: str, sensor: Callable[[], list[Finding]]) -> list[Finding]:
        """Return what a sensor says; nothing where it is off, or fails now."""
        if name in self.off:
            return []
        try:
            return sensor()
        except Exception as error:
            self.turn_off(name, error)
            return []

    def do(self, name: str, action: Callable[[], object]) -> None:
        """Have a sensor do what gives no findings; nothing where it is off, or fails now."""

        def quietly() -> list[Finding]:
            action()
            return []

        self.ask(name, quietly)

    def turn_off(self, name: str, error: Exception) -> None:
        """Ask a sensor no more."""
        self.off[name] = f"{type(error).__name__}: {error}"
        self._reporter.failure(f"sensor {name} (now off)", error, self._root.record.step)
