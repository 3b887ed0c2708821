"""Finding plugins: entry points of the group ``kinetic``, loaded and checked one by one, and the registry they fill.

    registry = load_registry()
    backend = registry.get("backend", "cpu")()
    architecture = registry.architecture_for("llama")(source)

A plugin that cannot be used is reported with its own error and left out; the rest carry on (``strict=True`` raises
instead). Nothing but the modules that entry points name is imported here: a registration's class is imported when it
is asked for. The environment variable KINETIC_PLUGINS filters: a comma list of distributions or entry points; names
alone allow only those (and the built-ins), names with a leading minus exclude.

A name or key that two plugins claim within one kind belongs to neither, so that no answer depends on the order of
installation: asking for it is an error that names both. The built-ins of kinetic-core keep theirs.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import attrs
import pluggy

from kinetic_core import hookspecs
from kinetic_core.errors import KineticError, PluginError, UnsupportedModelError, describe
from kinetic_core.hookspecs import ENTRY_POINT_GROUP, Registration

if TYPE_CHECKING:
    from collections.abc import Callable

    from kinetic_core.interfaces import Architecture, Drafter, KernelBackend, OutputHead, PrefixCache

Kind = Literal["architecture", "backend", "drafter", "cache", "head", "command"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FILTER_VARIABLE = "KINETIC_PLUGINS"
CORE_DISTRIBUTION = "kinetic-core"

_HOOK_KINDS: dict[str, Kind] = {
    "kinetic_architectures": "architecture",
    "kinetic_backends": "backend",
    "kinetic_drafters": "drafter",
    "kinetic_caches": "cache",
    "kinetic_heads": "head",
    "kinetic_commands": "command",
}
# The interface of a kind, and its capabilities, by name: importing them costs numpy, which listing does not need.
_INTERFACES: dict[Kind, tuple[str, str]] = {
    "architecture": ("Architecture", "ArchitectureCapabilities"),
    "backend": ("KernelBackend", "BackendCapabilities"),
    "drafter": ("Drafter", "DrafterCapabilities"),
    "cache": ("PrefixCache", "CacheCapabilities"),
    "head": ("OutputHead", "HeadCapabilities"),
}
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

FAMILY_PACKAGES: Mapping[str, str] = {
    "llama": "kinetic-arch-llama",
    "qwen35": "kinetic-arch-qwen35",
    "qwen35moe": "kinetic-arch-qwen35",
    "lfm2": "kinetic-arch-lfm",
    "lfm2moe": "kinetic-arch-lfm",
    "lfm3": "kinetic-arch-lfm",
    "granitehybrid": "kinetic-arch-granite",
    "falcon-h1": "kinetic-arch-falconh1",
}
"""``general.architecture`` -> the package to install for it."""


@attrs.frozen
class Registered:
    """A registration and where it came from."""

    kind: Kind
    registration: Registration
    distribution: str

    @property
    def labels(self) -> tuple[str, ...]:
        """What it answers to: its name and its keys."""
        return tuple(dict.fromkeys((self.registration.name, *self.registration.keys)))


@attrs.frozen
class Plugin:
    """One entry point and what became of it.

    registered: empty when the plugin could not be used.
    error:      one line, or None.
    traceback:  the full traceback of an error inside the plugin's own code, else empty.
    excluded:   left out by KINETIC_PLUGINS; never imported.
    """

    name: str
    module: str
    distribution: str
    version: str
    registered: tuple[Registered, ...] = ()
    error: str | None = None
    traceback: str = ""
    excluded: bool = False


class Registry:
    """What the usable plugins offer, by kind and name.

    plugins:  every entry point found, broken and excluded ones included.
    problems: one line for everything that is wrong: broken plugins, names claimed twice, filter names without a match.
    """

    def __init__(self, plugins: Iterable[Plugin], problems: Iterable[str] = ()) -> None:
        self.plugins: tuple[Plugin, ...] = tuple(plugins)
        self._claims: dict[tuple[Kind, str], list[Registered]] = {}
        for plugin in self.plugins:
            for registered in plugin.registered:
                for label in registered.labels:
                    self._claims.setdefault((registered.kind, label), []).append(registered)
        broken = [f"plugin {p.name} ({p.distribution} {p.version}): {p.error}" for p in self.plugins if p.error]
        twice = [_claimed_twice(kind, label, claims) for (kind, label), claims in self._claims.items() if claims[1:]]
        self.problems: tuple[str, ...] = (*problems, *broken, *twice)

    def registered(self, kind: Kind) -> tuple[Registered, ...]:
        """Everything of one kind, in the order of the plugins."""
        return tuple(entry for plugin in self.plugins for entry in plugin.registered if entry.kind == kind)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The names of one kind that `get` would find."""
        names = dict.fromkeys(entry.registration.name for entry in self.registered(kind))
        return tuple(name for name in names if self._owner(kind, name) is not None)

    def _owner(self, kind: Kind, label: str) -> Registered | None:
        claims = self._claims.get((kind, label), [])
        if len(claims) > 1:
            claims = [claim for claim in claims if claim.distribution == CORE_DISTRIBUTION]
        return claims[0] if len(claims) == 1 else None

    @overload
    def get(self, kind: Literal["architecture"], name: str) -> type[Architecture]: ...
    @overload
    def get(self, kind: Literal["backend"], name: str) -> type[KernelBackend]: ...
    @overload
    def get(self, kind: Literal["drafter"], name: str) -> type[Drafter]: ...
    @overload
    def get(self, kind: Literal["cache"], name: str) -> type[PrefixCache]: ...
    @overload
    def get(self, kind: Literal["head"], name: str) -> type[OutputHead]: ...
    @overload
    def get(self, kind: Literal["command"], name: str) -> Callable[[Any], None]: ...
    def get(self, kind: Kind, name: str) -> Any:
        """The class (for a command, the function) with this name or key, imported and checked.

        Raises PluginError: unknown (with suggestions), claimed by two plugins, or the target is not what its kind
        asks for.
        """
        if kind not in KINDS:
            raise PluginError(describe("unknown kind of plugin", got=repr(kind), expected=f"one of {', '.join(KINDS)}"))
        owner = self._owner(kind, name)
        if owner is None:
            claims = self._claims.get((kind, name), [])
            if claims:
                raise PluginError(_claimed_twice(kind, name, claims))
            raise PluginError(
                describe(
                    f"no plugin offers the {kind}",
                    got=repr(name),
                    expected=f"one of {', '.join(self.names(kind)) or 'none: no plugin of this kind is installed'}",
                    hint=_suggestion(name, self._labels(kind)) or "`kinetic plugins` lists what was found",
                )
            )
        return _resolve(owner)

    def architecture_for(self, key: str) -> type[Architecture]:
        """The class for a file's ``general.architecture``.

        Raises UnsupportedModelError naming the package to install where it is known, PluginError as `get` does.
        """
        if (("architecture", key)) in self._claims:
            return self.get("architecture", key)
        package = FAMILY_PACKAGES.get(key)
        for plugin in self.plugins:
            if package and _normalized(plugin.distribution) == package and (plugin.error or plugin.excluded):
                why = plugin.error or f"it is excluded by {FILTER_VARIABLE}"
                raise UnsupportedModelError(f"{package}, which runs the architecture {key!r}, cannot be used: {why}")
        hint = f"pip install {package}" if package else _suggestion(key, self._labels("architecture"))
        raise UnsupportedModelError(
            describe(
                "no installed plugin runs this model's architecture",
                got=repr(key),
                expected=f"one of {', '.join(self._labels('architecture')) or 'none: no architecture is installed'}",
                hint=hint or None,
            )
        )

    def _labels(self, kind: Kind) -> list[str]:
        return [label for claimed_kind, label in self._claims if claimed_kind == kind]


def load_registry(strict: bool = False, found: Iterable[EntryPoint] | None = None) -> Registry:
    """Load every plugin and check it.

    strict: raise PluginError listing every problem, in place of a registry that has problems.
    found:  entry points to use in place of the installed ones (tests, embedding).
    """
    points = list(entry_points(group=ENTRY_POINT_GROUP) if found is None else found)
    # kinetic-core first, then by distribution and name: the order of sys.path must not show anywhere.
    points.sort(key=lambda point: (_distribution(point)[0] != CORE_DISTRIBUTION, *_distribution(point), point.name))
    name_filter = _Filter(os.environ.get(FILTER_VARIABLE, ""))
    manager = pluggy.PluginManager("kinetic")
    manager.add_hookspecs(hookspecs)
    plugins = [_load(manager, point, name_filter) for point in points]
    registry = Registry(plugins, name_filter.unmatched())
    if strict and registry.problems:
        raise PluginError(f"problems with plugins are fatal with --strict: {'; '.join(registry.problems)}")
    return registry


def _load(manager: pluggy.PluginManager, point: EntryPoint, name_filter: _Filter) -> Plugin:
    distribution, version = _distribution(point)
    found = Plugin(name=point.name, module=point.value, distribution=distribution, version=version)
    if not name_filter.allows(point.name, distribution):
        return attrs.evolve(found, excluded=True)
    try:
        module = point.load()
        if not isinstance(module, ModuleType):
            raise PluginError(describe("the entry point must name a module", got=point.value))
        _check_hook_names(module)
        manager.register(module, name=f"{distribution}:{point.name}")
        registered = tuple(_collect(manager, module, distribution))
    except (Exception, SystemExit) as error:
        for hooked in [plugin for name, plugin in manager.list_name_plugin() if name == f"{distribution}:{point.name}"]:
            manager.unregister(hooked)
        text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        return attrs.evolve(found, error=" ".join(text.split()), traceback=traceback.format_exc())
    return attrs.evolve(found, registered=registered)


def _check_hook_names(module: ModuleType) -> None:
    """Refuse what pluggy would ignore in silence: misspelled hooks, and hooks without their marker."""
    for name, value in vars(module).items():
        if not callable(value) or isinstance(value, type):
            continue
        marked = getattr(value, "kinetic_impl", None) is not None
        if name in _HOOK_KINDS:
            if not marked:
                raise PluginError(describe(f"{name} lacks its decorator", where=module.__name__, hint="add @hookimpl"))
        elif marked or name.startswith("kinetic_"):
            raise PluginError(
                describe(
                    "unknown hook",
                    where=module.__name__,
                    got=name,
                    hint=_suggestion(name, _HOOK_KINDS) or f"the hooks are {', '.join(_HOOK_KINDS)}",
                )
            )


def _collect(manager: pluggy.PluginManager, module: ModuleType, distribution: str) -> Iterator[Registered]:
    for caller in manager.get_hookcallers(module) or ():
        kind = _HOOK_KINDS[caller.name]
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not module:
                continue
            offered: Any = implementation.function()
            for registration in offered:
                _check_registration(registration, caller.name)
                yield Registered(kind, registration, distribution)


def _check_registration(registration: object, hook: str) -> None:
    if not isinstance(registration, Registration):
        raise PluginError(describe(f"{hook} must return Registration objects", got=repr(registration)))
    if not isinstance(registration.keys, tuple | list):
        raise PluginError(
            describe(f"the keys of {registration.name}", got=repr(registration.keys), expected="a tuple of names")
        )
    for label in (registration.name, *registration.keys):
        if not isinstance(label, str) or not _NAME.fullmatch(label):
            raise PluginError(
                describe(f"a name from {hook}", got=repr(label), expected="letters, digits, '.', '_' and '-'")
            )
    if not isinstance(registration.target, str) or not _TARGET.fullmatch(registration.target):
        raise PluginError(
            describe(f"the target of {registration.name}", got=repr(registration.target), expected="module:Class")
        )


def _resolve(entry: Registered) -> Any:
    """Import a target and check it against its kind."""
    target = entry.registration.target
    where = f"{entry.kind} {entry.registration.name} of {entry.distribution}"
    module_name, _, qualified = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in qualified.split("."):
            value = getattr(value, part)
    except KineticError:  # it says itself what is wrong, with its own exit status
        raise
    except Exception as error:
        raise PluginError(
            describe(f"cannot import {target}", where=where, got=f"{type(error).__name__}: {error}")
        ) from error
    if entry.kind == "command":
        if not callable(value):
            raise PluginError(describe(f"{target} is no command", where=where, got=repr(value), expected="a function"))
        return value
    interfaces = importlib.import_module("kinetic_core.interfaces")
    interface_name, capabilities_name = _INTERFACES[entry.kind]
    if not isinstance(value, type) or not issubclass(value, getattr(interfaces, interface_name)):
        raise PluginError(
            describe(
                f"{target} is no {entry.kind}", where=where, got=repr(value), expected=f"a {interface_name} subclass"
            )
        )
    missing = sorted(getattr(value, "__abstractmethods__", ()))
    if missing:
        raise PluginError(describe(f"{target} is incomplete", where=where, hint=f"implement {', '.join(missing)}"))
    capabilities = getattr(value, "capabilities", None)
    if not is_dataclass(capabilities) or not isinstance(capabilities, getattr(interfaces, capabilities_name)):
        raise PluginError(
            describe(
                f"{target}.capabilities",
                where=where,
                got=repr(capabilities),
                expected=f"a {capabilities_name}",
            )
        )
    return value


class _Filter:
    """KINETIC_PLUGINS: which plugins may load."""

    def __init__(self, text: str) -> None:
        words = [word.strip() for word in text.split(",") if word.strip()]
        self._only = {_normalized(word) for word in words if not word.startswith("-")}
        self._not = {_normalized(word[1:]) for word in words if word.startswith("-")}
        self._seen: set[str] = set()

    def allows(self, name: str, distribution: str) -> bool:
        labels = {_normalized(name), _normalized(distribution)}
        self._seen |= labels
        if labels & self._not:
            return False
        return not self._only or bool(labels & self._only) or CORE_DISTRIBUTION in labels

    def unmatched(self) -> list[str]:
        """One line per name that no plugin has. Call it after every plugin was asked about."""
        return [
            describe(f"{FILTER_VARIABLE} names no plugin", got=name, hint=_suggestion(name, self._seen) or None)
            for name in sorted((self._only | self._not) - self._seen)
        ]


def _claimed_twice(kind: Kind, label: str, claims: list[Registered]) -> str:
    by = " and ".join(f"{claim.registration.name} of {claim.distribution}" for claim in claims)
    core = any(claim.distribution == CORE_DISTRIBUTION for claim in claims)
    rule = f"{CORE_DISTRIBUTION} keeps it" if core else "neither is used"
    distributions = list(dict.fromkeys(claim.distribution for claim in claims))
    others = [name for name in distributions if name != CORE_DISTRIBUTION] if distributions[1:] else []
    hint = f"exclude one with {FILTER_VARIABLE}=-{others[-1]}" if others else "give them different names"
    return f"the {kind} {label!r} is claimed twice, by {by}: {rule}; {hint}"


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def _distribution(point: EntryPoint) -> tuple[str, str]:
    """(name, version) of the distribution that an entry point comes from."""
    return (_normalized(point.dist.name), point.dist.version) if point.dist else ("unknown", "unknown")


def _normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
