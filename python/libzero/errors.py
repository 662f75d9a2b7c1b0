"""The errors of libzero. Their texts come from the C++ library."""


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
