"""The forms of a configuration that an Engine accepts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from libzero._native import Options

Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Options


def as_options(config: Config, settings: Mapping[str, Any] | None = None) -> Options:
    """Options from a path, a dict, JSON text or Options; settings: overrides by dotted key."""
    return Options(dict(config) if isinstance(config, Mapping) else config, dict(settings or {}))
