"""deepspeed.module_inject.layers"""

from libzero.deepspeed._refuse import module_getattr

__all__ = ["is_autotp_training_mode", "set_autotp_mode"]


def set_autotp_mode(training: bool = False) -> None:
    """[local] Nothing: an engine that cuts layers trains and evaluates."""


def is_autotp_training_mode() -> bool:
    """[local] True; see set_autotp_mode()."""
    return True


__getattr__ = module_getattr("deepspeed.module_inject.layers")
