"""The error tree. A message gives what was seen, where, what was expected, and what to do next."""

from __future__ import annotations

EXIT_FINDINGS = 1
"""Something was found: a difference, an overflow, a NaN (as diff and grep give it)."""
EXIT_USAGE = 2
"""The command line or a setting is not understood, or names something that is not there (as argparse gives it)."""
EXIT_UNREAD = 3
"""What was asked about could not be read or compared, whole or in part; also where something was found in the rest."""
EXIT_UNWRITTEN = 4
"""What was asked for could not be written: a full disk, a folder that may not be written to."""
EXIT_ELSEWHERE = 16
"""The run asks for a second opinion: resume it on other devices (the meaning Megatron-LM gave the code)."""
EXIT_CONVICTED = 17
"""A device was proven to compute wrongly, or a state to be corrupt; do not restart on it."""
EXIT_RANK_LOST = 18
"""A rank died or stopped answering while the ranks were questioning one another."""
EXIT_INTERNAL = 70
"""bitwitness itself failed (EX_SOFTWARE of sysexits.h); the traceback is in a file that is named."""
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C, as a shell gives it; 143 by SIGTERM, 141 because nobody reads the output any more."""
EXIT_PIPE_CLOSED = 141
EXIT_TERMINATED = 143


class BitwitnessError(Exception):
    """Root of every error that bitwitness raises on purpose."""


class UsageError(BitwitnessError):
    """The caller asked for something that cannot be done as asked."""

    exit_code = EXIT_USAGE
    """What the command line ends with."""


class UnreadError(UsageError):
    """A file is there but could not be read: damaged, forbidden, of another kind or format."""

    exit_code = EXIT_UNREAD


class UnwrittenError(UsageError):
    """What was asked for could not be written."""

    exit_code = EXIT_UNWRITTEN


class ConfigError(UsageError):
    """A configuration key or value is not understood; the message names the nearest known key."""


class SideChannelError(BitwitnessError):
    """The ranks' side channel broke: a peer closed its connection or missed the deadline."""


class TrainingStopped(SystemExit):
    """Ends a training on purpose, past any ``except Exception`` of the script.

    Parameters
    ----------
    code
        The process's exit code: `EXIT_CONVICTED`, `EXIT_ELSEWHERE` or `EXIT_RANK_LOST`.
    reason
        One line, already printed when this is raised.

    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __reduce__(self) -> tuple[type[TrainingStopped], tuple[object, str]]:
        return type(self), (self.code, self.reason)  # a pool of processes sends it to its parent

    def __str__(self) -> str:
        return self.reason
