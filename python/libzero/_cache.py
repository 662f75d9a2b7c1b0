"""Where torch puts compiled code, if this process has no user name or no temporary folder.

torch.optim.Optimizer imports torch._dynamo, which names a folder /tmp/torchinductor_<user> and makes it, also in
programs that compile nothing. That fails for a user without an entry in /etc/passwd and without USER, such as
docker run --user 12345, and where no temporary folder can be written.
"""

import getpass
import os
import tempfile

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def _usable(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def prepare() -> None:
    """[local] Sets TORCHINDUCTOR_CACHE_DIR, where torch's own choice would raise an exception."""
    if _VARIABLE in os.environ:
        return
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # since Python 3.13 the second
        user = ""
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        temporary = ""
    if user and temporary:
        return
    if not temporary and _usable("/dev/shm"):
        temporary = "/dev/shm"
    # The root folder exists, so that torch makes none: what is compiled later fails with its own message.
    os.environ[_VARIABLE] = os.path.join(temporary, f"torchinductor_{user or os.getuid()}") if temporary else "/"
