"""The errors of libzero, with the texts of the library."""


class ConfigError(ValueError):
    """The user can fix it: a configuration, a model the engine cannot take, a call out of order."""

    code: int = 2


class CommError(RuntimeError):
    """A peer or the network failed. The communicator is unusable afterwards."""

    code: int = 6
    rank: int = -1
    """The rank that failed, or -1 when it is not known."""


class IoError(OSError):
    """A file or a disk failed; code 3 for a checkpoint that is missing or damaged."""

    code: int = 5


class InternalError(RuntimeError):
    """A bug of libzero, or numbers that cannot be trusted any more (code 7)."""

    code: int = 1
