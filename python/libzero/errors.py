"""The errors of libzero. Their texts come from the C++ library."""

import sys
from types import TracebackType

from libzero import _native


class ConfigError(ValueError):
    """An error that the user can fix: a configuration, an unsupported model, a call in the wrong order."""

    code: int = 2


class CommError(RuntimeError):
    """A peer or the network failed. The communicator is unusable afterwards."""

    code: int = 6
    rank: int = -1
    """The rank that failed; -1 if unknown."""


class IoError(OSError):
    """A file or disk error; code 3 for a missing or damaged checkpoint."""

    code: int = 5


class InternalError(RuntimeError):
    """A bug in libzero, or a numerical failure (code 7)."""

    code: int = 1


def end_with_documented_codes() -> None:
    """An error of libzero that nobody catches ends the program with its code (docs/cli.md), not with Python's 1.

    The hook returns: torch.distributed wraps it in one of its own, which shows nothing after a SystemExit.
    """
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        # At a prompt the session continues.
        if isinstance(error, ConfigError | CommError | IoError | InternalError) and not hasattr(sys, "ps1"):
            _native.end_with(error.code)

    sys.excepthook = hook
