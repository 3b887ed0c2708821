"""Discovery, checks and lookup of plugins, on modules written for each test and entry points made in memory."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest

from kinetic_core.errors import BackendError, PluginError, UnsupportedModelError
from kinetic_core.plugins import Plugin, Registry, load_registry

MakePlugin = Callable[..., EntryPoint]

HEAD_CLASS = """
from kinetic_core.interfaces import HeadCapabilities, OutputHead

class Good(OutputHead):
    capabilities = HeadCapabilities()
    def record(self, b, hidden, weight, scale):
        return hidden
"""


def hook(body: str, name: str = "kinetic_heads") -> str:
    return f"""
from kinetic_core.hookspecs import Registration, hookimpl

@hookimpl
def {name}():
    {body}
"""


class _Distribution(Distribution):
    def __init__(self, name: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


@pytest.fixture
def make_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePlugin]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("KINETIC_PLUGINS", raising=False)
    made: list[str] = []

    def make(module: str, source: str, distribution: str | None = None, name: str = "main") -> EntryPoint:
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        made.append(module)
        point = EntryPoint(name=name, value=module, group="kinetic")
        vars(point)["dist"] = _Distribution(distribution or module.replace("_", "-"))
        return point

    yield make
    for module in made:
        sys.modules.pop(module, None)


def only(registry: Registry, distribution: str) -> Plugin:
    (plugin,) = (plugin for plugin in registry.plugins if plugin.distribution == distribution)
    return plugin


def test_a_good_plugin_is_listed_and_its_class_resolved_lazily(make_plugin: MakePlugin) -> None:
    make_plugin("kt_good_impl", HEAD_CLASS)
    point = make_plugin("kt_good", hook('return [Registration("mine", "kt_good_impl:Good", keys=("alias",))]'))
    registry = load_registry(found=[point])
    assert registry.problems == ()
    assert registry.names("head") == ("mine",)
    assert registry.names("backend") == ()
    assert only(registry, "kt-good").version == "1.2"
    assert "kt_good_impl" not in sys.modules, "listing must not import the target"
    assert registry.get("head", "mine").__name__ == "Good"
    assert registry.get("head", "alias") is registry.get("head", "mine")


BROKEN = {
    "import": ("import no_such_module_at_all\n", "no_such_module_at_all"),
    "exit": ("raise SystemExit(3)\n", "SystemExit"),
    "hook raises": (hook('raise ValueError("boom 17")'), "boom 17"),
    "misspelled": (hook("return []", name="kinetic_haeds"), "did you mean kinetic_heads?"),
    "misspelled without marker": ("def kinetic_backend():\n    return []\n", "did you mean kinetic_backends?"),
    "marked under a foreign name": (hook("return []", name="heads"), "unknown hook in kt_broken: got heads"),
    "unmarked": ("def kinetic_heads():\n    return []\n", "@hookimpl"),
    "arguments": (hook("return []").replace("kinetic_heads()", "kinetic_heads(extra)"), "extra"),
    "not registrations": (hook('return ["mine"]'), "must return Registration objects: got 'mine'"),
    "nothing": (hook("return None"), "NoneType"),
    "bad name": (hook('return [Registration("a b", "m:C")]'), "'a b'"),
    "bad key": (hook('return [Registration("a", "m:C", keys=("",))]'), "''"),
    "a key in place of keys": (hook('return [Registration("a", "m:C", keys="abc")]'), "the keys of a: got 'abc'"),
    "bad target": (hook('return [Registration("a", "m.C")]'), "'m.C', expected module:Class"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_and_the_rest_carry_on(make_plugin: MakePlugin, case: str) -> None:
    source, message = BROKEN[case]
    make_plugin("kt_good_impl", HEAD_CLASS)
    points = [
        make_plugin("kt_broken", source),
        make_plugin("kt_good", hook('return [Registration("mine", "kt_good_impl:Good")]')),
    ]
    registry = load_registry(found=points)
    broken = only(registry, "kt-broken")
    assert broken.error is not None and message in broken.error and "\n" not in broken.error
    assert "Traceback" in broken.traceback
    assert broken.registered == ()
    (problem,) = registry.problems
    assert "kt-broken" in problem and message in problem
    assert registry.get("head", "mine").__name__ == "Good"
    with pytest.raises(PluginError, match=r"--strict.*kt-broken"):
        load_registry(strict=True, found=points)


def test_an_entry_point_that_names_a_class_is_refused(make_plugin: MakePlugin) -> None:
    point = make_plugin("kt_good_impl", HEAD_CLASS)
    of_class = EntryPoint(name="x", value="kt_good_impl:Good", group="kinetic")
    vars(of_class)["dist"] = point.dist
    (plugin,) = load_registry(found=[of_class]).plugins
    assert plugin.error == "the entry point must name a module: got kt_good_impl:Good"


def test_a_name_claimed_twice_belongs_to_neither_and_names_both(make_plugin: MakePlugin) -> None:
    make_plugin("kt_good_impl", HEAD_CLASS)
    points = [
        make_plugin("kt_b", hook('return [Registration("same", "kt_good_impl:Good")]')),
        make_plugin("kt_a", hook('return [Registration("x", "kt_good_impl:Good", keys=("same",))]')),
    ]
    registry = load_registry(found=points)
    assert registry.names("head") == ("x",)
    (problem,) = registry.problems
    assert "'same' is claimed twice, by x of kt-a and same of kt-b" in problem and "KINETIC_PLUGINS=-kt-b" in problem
    with pytest.raises(PluginError, match="claimed twice, by x of kt-a and same of kt-b: neither is used"):
        registry.get("head", "same")
    assert registry.get("head", "x").__name__ == "Good"
    with pytest.raises(PluginError, match="claimed twice"):
        load_registry(strict=True, found=points)


def test_the_core_keeps_its_names(make_plugin: MakePlugin) -> None:
    make_plugin("kt_good_impl", HEAD_CLASS)
    make_plugin("kt_other_impl", HEAD_CLASS.replace("Good", "Other"))
    points = [
        make_plugin("kt_a", hook('return [Registration("full", "kt_other_impl:Other")]'), "a-first"),
        make_plugin("kt_core", hook('return [Registration("full", "kt_good_impl:Good")]'), "Kinetic_Core"),
    ]
    registry = load_registry(found=points)
    assert [plugin.distribution for plugin in registry.plugins] == ["kinetic-core", "a-first"]
    assert registry.get("head", "full").__name__ == "Good"
    assert "kinetic-core keeps it; exclude one with KINETIC_PLUGINS=-a-first" in registry.problems[0]


def test_one_name_in_two_kinds_is_no_conflict(make_plugin: MakePlugin) -> None:
    source = hook('return [Registration("same", "a:B")]') + hook(
        'return [Registration("same", "a:B")]', "kinetic_caches"
    )
    assert load_registry(found=[make_plugin("kt_two", source)]).problems == ()


def test_unknown_names_come_with_suggestions(make_plugin: MakePlugin) -> None:
    point = make_plugin("kt_good", hook('return [Registration("context", "a:B"), Registration("null", "a:B")]'))
    registry = load_registry(found=[point])
    with pytest.raises(PluginError, match=r"'contex', expected one of context, null; did you mean context\?"):
        registry.get("head", "contex")
    with pytest.raises(PluginError, match="no plugin of this kind is installed"):
        registry.get("cache", "context")
    with pytest.raises(PluginError, match="unknown kind of plugin: got 'heads'"):
        registry.get("heads", "context")  # type: ignore[call-overload]


WRONG_TARGETS = {
    "kt_impl:Missing": "AttributeError",
    "kt_no_such:X": "ModuleNotFoundError",
    "kt_impl:function": "expected a OutputHead subclass",
    "kt_impl:Unrelated": "expected a OutputHead subclass",
    "kt_impl:Abstract": "implement record",
    "kt_impl:Bare": "got None, expected a HeadCapabilities",
    "kt_impl:Foreign": "expected a HeadCapabilities",
}


@pytest.mark.parametrize("target", WRONG_TARGETS)
def test_a_target_of_the_wrong_kind_is_refused(make_plugin: MakePlugin, target: str) -> None:
    make_plugin(
        "kt_impl",
        """
        from kinetic_core.interfaces import CacheCapabilities, HeadCapabilities, OutputHead
        def function(): ...
        class Unrelated: ...
        class Abstract(OutputHead):
            capabilities = HeadCapabilities()
        class Bare(OutputHead):
            def record(self, b, hidden, weight, scale): ...
        class Foreign(Bare):
            capabilities = CacheCapabilities()
        """,
    )
    point = make_plugin("kt_good", hook(f'return [Registration("mine", "{target}")]'))
    with pytest.raises(PluginError, match=f"head mine of kt-good.*{WRONG_TARGETS[target]}"):
        load_registry(found=[point]).get("head", "mine")


def test_an_error_of_ours_on_import_stays_itself(make_plugin: MakePlugin) -> None:
    make_plugin("kt_impl", "from kinetic_core.errors import BackendError\nraise BackendError('no such device')\n")
    point = make_plugin("kt_good", hook('return [Registration("mine", "kt_impl:X")]', "kinetic_backends"))
    with pytest.raises(BackendError, match=r"^no such device$"):
        load_registry(found=[point]).get("backend", "mine")


def test_a_command_is_any_function(make_plugin: MakePlugin) -> None:
    make_plugin("kt_impl", "def add(app):\n    app.append(1)\nvalue = 3\n")
    body = 'return [Registration("extra", "kt_impl:add"), Registration("bad", "kt_impl:value")]'
    registry = load_registry(found=[make_plugin("kt_good", hook(body, "kinetic_commands"))])
    seen: list[int] = []
    registry.get("command", "extra")(seen)
    assert seen == [1]
    with pytest.raises(PluginError, match="kt_impl:value is no command"):
        registry.get("command", "bad")


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ("", ["core", "one", "two"]),
        ("kt-one", ["core", "one"]),
        (" KT_one , ", ["core", "one"]),
        ("second", ["core", "two"]),
        ("-kt-one", ["core", "two"]),
        ("-kinetic-core", ["one", "two"]),
        ("kt-one,-kt-one", ["core"]),
    ],
)
def test_the_environment_filter(
    make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch, text: str, loaded: list[str]
) -> None:
    points = [
        make_plugin("kt_core", hook('return [Registration("core", "a:B")]'), "kinetic-core"),
        make_plugin("kt_one", hook('return [Registration("one", "a:B")]')),
        make_plugin("kt_two", hook('return [Registration("two", "a:B")]'), name="second"),
    ]
    monkeypatch.setenv("KINETIC_PLUGINS", text)
    registry = load_registry(found=points)
    assert registry.problems == ()
    assert list(registry.names("head")) == loaded
    assert sum(plugin.excluded for plugin in registry.plugins) == 3 - len(loaded)


def test_an_excluded_plugin_is_not_imported(make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_PLUGINS", "-kt-bomb")
    registry = load_registry(strict=True, found=[make_plugin("kt_bomb", "raise RuntimeError\n")])
    assert only(registry, "kt-bomb").excluded and "kt_bomb" not in sys.modules


def test_a_filter_name_without_a_match_is_reported(make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_PLUGINS", "-kt-godo")
    registry = load_registry(found=[make_plugin("kt_good", hook("return []"))])
    assert registry.problems == ("KINETIC_PLUGINS names no plugin: got kt-godo; did you mean kt-good?",)


@pytest.mark.parametrize(
    ("key", "package"),
    [
        ("llama", "kinetic-arch-llama"),
        ("qwen35", "kinetic-arch-qwen35"),
        ("qwen35moe", "kinetic-arch-qwen35"),
        ("lfm2", "kinetic-arch-lfm"),
        ("lfm2moe", "kinetic-arch-lfm"),
        ("lfm3", "kinetic-arch-lfm"),
        ("granitehybrid", "kinetic-arch-granite"),
        ("falcon-h1", "kinetic-arch-falconh1"),
    ],
)
def test_a_known_family_names_the_package_to_install(make_plugin: MakePlugin, key: str, package: str) -> None:
    others = [make_plugin("kt_broken", "raise RuntimeError"), make_plugin("kt_good", hook("return []"))]
    for found in ([], others):
        with pytest.raises(UnsupportedModelError, match=f"got '{key}'.*; pip install {package}$"):
            load_registry(found=found).architecture_for(key)


def test_without_any_architecture_the_message_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match="expected one of none: no architecture is installed"):
        load_registry(found=[]).architecture_for("toy")


def test_an_unknown_architecture_gets_a_suggestion(make_plugin: MakePlugin) -> None:
    point = make_plugin(
        "kt_arch", hook('return [Registration("Toy", "a:B", keys=("toymodel",))]', "kinetic_architectures")
    )
    with pytest.raises(UnsupportedModelError, match=r"got 'toymodle'.*did you mean toymodel\?"):
        load_registry(found=[point]).architecture_for("toymodle")


def test_a_known_family_whose_plugin_is_broken_says_so(
    make_plugin: MakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = make_plugin("kt_llama", "raise RuntimeError('no luck')\n", "kinetic-arch-llama")
    with pytest.raises(UnsupportedModelError, match=r"kinetic-arch-llama.*cannot be used: RuntimeError: no luck"):
        load_registry(found=[point]).architecture_for("llama")
    monkeypatch.setenv("KINETIC_PLUGINS", "-kinetic-arch-llama")
    with pytest.raises(UnsupportedModelError, match="excluded by KINETIC_PLUGINS"):
        load_registry(found=[point]).architecture_for("llama")
