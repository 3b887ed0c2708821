"""``kinetic plugins``: what was found, and what is wrong with it."""

from __future__ import annotations

import os
import sys
from typing import Any

from kinetic_core.cli.console import one_line, print_json
from kinetic_core.cli.options import JSONOption, StrictOption
from kinetic_core.plugins import Plugin, load_registry


def plugins(strict: StrictOption = False, as_json: JSONOption = False) -> None:
    """List the plugins that were found, what they offer, and what is wrong."""
    registry = load_registry(strict=strict)
    if as_json:
        print_json(
            {"plugins": [_described(plugin) for plugin in registry.plugins], "problems": list(registry.problems)}
        )
        return
    for plugin in registry.plugins:
        state = " (excluded by KINETIC_PLUGINS)" if plugin.excluded else " (broken)" if plugin.error else ""
        print(f"{plugin.distribution} {plugin.version}: {plugin.name}{state}")
        for entry in plugin.registered:
            summary = one_line(entry.registration.summary)
            print(f"  {entry.kind:<14}{entry.registration.name:<14}{summary}".rstrip())
    if not registry.plugins:
        print("no plugins: not even kinetic-core is installed; pip install kinetic-core")
    for problem in registry.problems:
        print(f"problem: {one_line(problem)}", file=sys.stderr)
    if os.environ.get("KINETIC_DEBUG") == "1":
        for plugin in registry.plugins:
            print(plugin.traceback, end="", file=sys.stderr)


def _described(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.module,
        "registered": [
            {
                "kind": entry.kind,
                "name": entry.registration.name,
                "keys": list(entry.registration.keys),
                "target": entry.registration.target,
                "summary": entry.registration.summary,
            }
            for entry in plugin.registered
        ],
        "excluded": plugin.excluded,
        "error": plugin.error,
        "traceback": plugin.traceback,
    }
