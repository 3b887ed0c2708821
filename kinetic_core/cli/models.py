"""``kinetic models``: known names, and what is on this machine."""

from __future__ import annotations

from kinetic_core.cli.console import megabytes, print_json
from kinetic_core.cli.options import JSONOption


def models(as_json: JSONOption = False) -> None:
    """List the known names and the models on this machine."""
    from kinetic_core.models import DEFAULT_MODEL, KNOWN_MODELS, TINY_HYBRID, KnownModel, fetched_models

    here = fetched_models()
    miniature = KnownModel(TINY_HYBRID, "memory", 0, "Apache-2.0", "a miniature in memory, for tests and tours")
    known = [*KNOWN_MODELS.values(), miniature]
    if as_json:
        print_json(
            {
                "default": DEFAULT_MODEL,
                "known": [{"name": m.name, "bytes": m.n_bytes, "license": m.license, "title": m.title} for m in known],
                "here": [{"name": m.name, "path": str(m.path), "bytes": m.n_bytes} for m in here],
            }
        )
        return
    print("Known names:")
    for model in known:
        default = " (the default)" if model.name == DEFAULT_MODEL else ""
        print(f"  {model.name:<14} {megabytes(model.n_bytes):>8}  {model.license:<11} {model.title}{default}")
    print("On this machine:" if here else "On this machine: none yet; `kinetic pull` fetches the default model")
    for found in here:
        print(f"  {found.name}  {megabytes(found.n_bytes)}  {found.path}")
