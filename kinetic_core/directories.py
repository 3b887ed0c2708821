"""Where Kinetic keeps files of its own: models, compiled kernels, tokenizers, saved states, the chat history."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "KINETIC_CACHE_DIR"


def cache_directory() -> Path:
    """The cache directory: KINETIC_CACHE_DIR, or the user's cache directory for ``kinetic``. It may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("kinetic", appauthor=False)
