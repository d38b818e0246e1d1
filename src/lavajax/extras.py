"""Optional packages: imported where they are used, with a message where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(package: str, extra: str, purpose: str) -> ModuleType:
    """Imports a package of an optional extra.

    Args:
        package: its import name.
        extra: the extra of ``pyproject.toml`` that brings it.
        purpose: what it is needed for, as the start of a sentence.

    Raises:
        ModuleNotFoundError: it is missing; the message has the command that installs it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{purpose} needs {package}: pip install ".[{extra}]", from the source folder ({error})'
        ) from error
