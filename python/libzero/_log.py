"""Forwards the library's log messages to the logger "libzero"."""

import atexit
import logging

from libzero import _native

logger = logging.getLogger("libzero")
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def _log(level: int, text: str) -> None:
    logger.log(_LEVELS[level], text)


_native.set_log_sink(_log)
atexit.register(_native.set_log_sink, None)
