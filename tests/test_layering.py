"""Who may import whom: a layer imports itself and lower ones, the core no plugin, a plugin the core's public names."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"errors", "hookspecs", "interfaces"},
    {"plugins", "program", "layers", "gguf", "text", "models", "directories", "checkpoint"},
    {"reference", "backends", "state"},
    {"engine", "warmstart"},
    {"conformance", "server", "cli", "bench", "convert", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FREE = {"kinetic_core", "kinetic_core.builtins"}
"""The facade, and the registrations, which name their targets as strings."""
PUBLIC = {
    "kinetic_core",
    *(
        f"kinetic_core.{name}"
        for name in ("errors", "hookspecs", "interfaces", "program", "layers", "gguf", "checkpoint")
    ),
}
"""Where a plugin may import from."""


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, str | None]]:
    """(module, name or None) of every import outside `if TYPE_CHECKING`; relative ones resolved in `package`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), package)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)
        else:
            yield from imports(node, package)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def core_faults(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module of the core imports and may not."""
    package = module if is_package else module.rpartition(".")[0]
    faults = []
    for target, name in imports(ast.parse(source), package):
        if target == "kinetic_core" and name is not None and is_module(f"kinetic_core.{name}"):
            target = f"kinetic_core.{name}"
        top, *rest = target.split(".")
        if top.startswith("kinetic_") and top != "kinetic_core":
            faults.append(f"{module} imports the plugin {target}")
        if top == "kinetic_core" and rest and module not in FREE:
            own = module.split(".")[1]
            if rest[0] not in LEVEL or LEVEL[rest[0]] > LEVEL[own]:
                faults.append(f"{module} imports {target}, which is not below it")
    return faults


def plugin_faults(source: str, module: str) -> list[str]:
    """What a module of a plugin imports and may not."""
    own, faults = module.split(".")[0], []
    for target, name in imports(ast.parse(source), module.rpartition(".")[0]):
        top = target.split(".")[0]
        if not top.startswith("kinetic_") or top == own:
            continue
        if top != "kinetic_core":
            faults.append(f"{module} imports the plugin {target}")
        elif target not in PUBLIC:
            faults.append(f"{module} imports {target}, which is no public package of the core")
        elif name is None or not is_public(target, name):
            faults.append(f"{module} imports {name} from {target}, which is no public name")
    return faults


def is_public(module: str, name: str) -> bool:
    loaded = importlib.import_module(module)
    return name in getattr(loaded, "__all__", [n for n in vars(loaded) if not n.startswith("_")])


def modules(folder: Path) -> list[tuple[Path, str]]:
    found = sorted(path for path in folder.rglob("*.py") if "tests" not in path.relative_to(folder).parts)
    return [(path, ".".join(path.relative_to(folder.parent).with_suffix("").parts)) for path in found]


CORE = modules(ROOT / "kinetic_core")
PLUGINS = [
    found
    for package in sorted([*(ROOT / "plugins").glob("*/kinetic_*"), *(ROOT / "docs" / "examples").glob("*/kinetic_*")])
    if (package / "__init__.py").exists()
    for found in modules(package)
]


@pytest.mark.parametrize(("path", "module"), CORE, ids=[module for _, module in CORE])
def test_core(path: Path, module: str):
    name = module.removesuffix(".__init__")
    if name not in FREE:
        assert name.split(".")[1] in LEVEL, f"give {name} a layer"
    assert core_faults(path.read_text("utf-8"), name, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(("path", "module"), PLUGINS, ids=[module for _, module in PLUGINS])
def test_plugins(path: Path, module: str):
    assert plugin_faults(path.read_text("utf-8"), module) == []


def test_there_is_something_to_look_at():
    assert {"kinetic_core.errors", "kinetic_core.reference.backend"} <= {module for _, module in CORE}
    assert {"kinetic_arch_llama.architecture", "kinetic_arch_toy.architecture"} <= {module for _, module in PLUGINS}


@pytest.mark.parametrize(
    ("module", "source", "faulty"),
    [
        ("kinetic_core.gguf.file", "from kinetic_core.engine import request", True),
        ("kinetic_core.gguf.file", "def f():\n    import kinetic_core.server.app", True),
        ("kinetic_core.gguf.file", "from kinetic_core import engine", True),
        ("kinetic_core.gguf.file", "from ..engine import request", True),
        ("kinetic_core.gguf.file", "from .blocks import BlockFormat", False),
        ("kinetic_core.gguf.file", "from kinetic_core import __version__", False),
        ("kinetic_core.gguf.file", "from kinetic_core import nothing_known", False),
        ("kinetic_core.gguf.file", "import kinetic_core.unheard_of", True),
        ("kinetic_core.gguf.file", "if TYPE_CHECKING:\n    from kinetic_core.engine import request", False),
        ("kinetic_core.gguf.file", "if TYPE_CHECKING:\n    pass\nelse:\n    import kinetic_core.engine", True),
        ("kinetic_core.gguf.file", "try:\n    import kinetic_core.engine\nexcept ImportError:\n    pass", True),
        ("kinetic_core.engine.engine", "from kinetic_core.state import pools", False),
        ("kinetic_core.engine.engine", "import kinetic_arch_llama.architecture", True),
        ("kinetic_core.builtins", "import kinetic_core.engine", False),
        ("kinetic_core.builtins", "import kinetic_arch_llama", True),
    ],
)
def test_the_check_of_the_core(module: str, source: str, faulty: bool):
    assert bool(core_faults(source, module)) is faulty


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        ("from kinetic_core.interfaces import Architecture", False),
        ("from kinetic_core.hookspecs import Registration", False),
        ("from kinetic_arch_llama.architecture import Llama\nimport numpy", False),
        ("from . import architecture", False),
        ("from kinetic_core.interfaces.architecture import Architecture", True),
        ("from kinetic_core.interfaces import architecture", True),
        ("from kinetic_core.engine.engine import Engine", True),
        ("import kinetic_core.gguf", True),
        ("from kinetic_core.gguf import _something", True),
        ("import kinetic_drafters", True),
        ("if TYPE_CHECKING:\n    from kinetic_core.gguf.source import TensorSource", False),
    ],
)
def test_the_check_of_plugins(source: str, faulty: bool):
    assert bool(plugin_faults(source, "kinetic_arch_llama.plugin")) is faulty
