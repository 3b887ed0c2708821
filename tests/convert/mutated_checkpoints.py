"""Small checkpoints of every family, mutated: converted, or refused with one of our own errors, in bounded memory.

    python tests/convert/mutated_checkpoints.py 1000 7        # so many mutations, from this seed

Values of config.json, tokenizer.json and their companions, entries of the safetensors header and bytes of any file
are replaced, dropped, doubled or moved. What converts nevertheless is loaded and runs one step on the reference. The
process may take `MEMORY_BYTES` more than it has when it begins.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints import write_checkpoint

import kinetic_core
from kinetic_core.convert import convert
from kinetic_core.errors import KineticError
from kinetic_core.plugins import load_registry

BASES: dict[str, dict[str, Any]] = {
    "llama3rope-f32": {},
    "lfm2-bf16": {"shards": 2},
    "lfm2moe-bf16": {},
    "lfm3deep-f32": {},
    "granitehybrid-bf16": {},
    "granitehybridmoe-bf16": {},
    "falconh1nonorm-f32": {},
    "falconh1-q8_0": {},
    "qwen35deep-bf16": {"fused": True},
    "qwen35-bf16": {},
    "qwen35moe-q4_k_m": {"packed": True},
}
"""The golden files whose checkpoints are mutated, and how these are written."""
MEMORY_BYTES = 1 << 30
SLOWEST_S = 20.0
"""What no mutation may take, on a machine with neighbours; most take a tenth of a second."""
NUMBERS = (0, 1, 2, 3, 5, 7, 16, 255, 256, 257, 65536, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(-number for number in NUMBERS[1:]),
    10**400,
    0.0,
    -0.0,
    0.5,
    1e-45,
    1e38,
    1e39,
    -1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    None,
    True,
    False,
    "",
    "x",
    "0",
    "\ud800",
    "a\0b",
    "long " * 1000,
    [],
    [0],
    [1, "2", None],
    [[[]]],
    [1] * 1000,
    {},
    {"type": "x"},
    {"": {}},
)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside one, but of a long list's or object's only the first twenty."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[:20]:
        yield (*path, key)
        yield from nodes(inner, (*path, key))


def mutate_json(value: Any, random_: random.Random) -> Any:
    """One value inside replaced, dropped, doubled, or put where another was."""
    paths = list(nodes(value))
    if not paths or random_.random() < 0.01:
        return random_.choice(VALUES)
    *way, last = random_.choice(paths)
    parent = value
    for key in way:
        parent = parent[key]
    match random_.randrange(8):
        case 0:
            del parent[last]
        case 1:
            parent[last] = [parent[last], parent[last]]
        case 2:
            parent[last] = {"x": parent[last]}
        case 3 if isinstance(parent[last], int | float):
            parent[last] = random_.choice((-1, 2, 3, 0.5, 2**20, 2**33)) * parent[last]
        case 4 if isinstance(parent, dict):
            name = random_.choice((f"{last}x", str(last)[:-1]))
            parent[name] = parent[last]
        case 5:
            source: Any = value
            for key in random_.choice(paths):
                source = source[key]
            parent[last] = json.loads(json.dumps(source))
        case _:
            parent[last] = random_.choice(VALUES)
    return value


def mutate_header(path: Path, random_: random.Random) -> None:
    """One or two values of a safetensors file's table."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    names = list(table)
    name = random_.choice(names)
    if random_.random() < 0.3:
        table = mutate_json(table, random_)
    else:
        entry = table[name]
        if "shape" in entry and random_.random() < 0.5:  # as many elements in another shape
            count = 1
            for part in entry["shape"]:
                count *= part
            shape = entry["shape"]
            entry["shape"] = random_.choice(([count], [1, count], [count, 1], shape[::-1], [1, *shape], [*shape, 1]))
        else:
            table[name] = mutate_json(entry, random_)
    header = json.dumps(table).encode("utf-8", "surrogatepass")
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def mutate_bytes(path: Path, random_: random.Random) -> None:
    """A few bytes of the beginning of a file, or its end cut off."""
    raw = bytearray(path.read_bytes())
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(min(len(raw), 2000)) if raw else 0
        match random_.randrange(4):
            case 0:
                raw[at : at + 1] = bytes([random_.randrange(256)])
            case 1:
                raw[at:at] = random_.randbytes(random_.randint(1, 20))
            case 2:
                del raw[at : at + random_.randint(1, 20)]
            case _:
                del raw[random_.randrange(len(raw) + 1) :]
    path.write_bytes(raw)


def mutate(folder: Path, random_: random.Random) -> bool:
    """Strike once or twice; whether the tokenizer's own files were struck."""
    tokenizer = False
    for _ in range(random_.choice((1, 1, 1, 2))):
        weights = sorted(folder.glob("*.safetensors"))
        texts = sorted(path for path in folder.glob("*.json") if path.name not in ("config.json", "tokenizer.json"))
        chance = random_.random()
        if chance < 0.2:
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # its bytes were struck before
                mutate_header(random_.choice(weights), random_)
            continue
        if chance < 0.27:
            path = random_.choice([*weights, *texts, folder / "config.json", folder / "tokenizer.json"])
            mutate_bytes(path, random_)
        else:
            path = folder / "config.json" if chance < 0.65 else folder / "tokenizer.json"
            path = random_.choice(texts) if chance > 0.9 else path
            try:
                value = json.loads(path.read_text("utf-8"))
            except ValueError:  # struck before
                continue
            text = json.dumps(mutate_json(value, random_))
            path.write_text(text, "utf-8")
        tokenizer |= path.name == "tokenizer.json"
    return tokenizer


def attempt(folder: Path, out: Path, registry: Any, name: str | None, *, run: bool) -> str:
    """Convert, and run what comes of it: "converted", or the class of our error. Other errors come through."""
    try:
        convert(folder, out, "f32", registry=registry, overwrite=True, n_threads=1, pre_tokenizer=name)
        if run:
            with kinetic_core.load(str(out), backend="reference", kv="f32", ctx=64, parallel=1) as model:
                model.generate(model.tokenize("a b")[:4] or [0], max_tokens=1, temperature=0.0, ignore_end=True)
    except KineticError as error:
        return type(error).__name__
    return "converted"


def fuzz(n_mutations: int, seed: int, folder: Path) -> tuple[collections.Counter[str], list[str]]:
    """How often what came of it, and a description of each error that is not ours, or that took too long."""
    bases = [write_checkpoint(folder / name, f"{name}.gguf", **how) for name, how in BASES.items()]
    for base in bases:
        (base / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1}')
    registry = load_registry()
    for name, base in zip(BASES, bases, strict=True):  # before the limit: modules and caches are loaded here
        pre = None if base is bases[0] else "qwen2"  # recognising one takes longest
        assert attempt(base, folder / "out.gguf", registry, pre, run=True) == "converted", name
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    for number in range(n_mutations):
        random_ = random.Random(f"{seed}-{number}")
        base = random_.choice(bases)
        struck = folder / "struck"
        shutil.copytree(base, struck)
        pre = None if mutate(struck, random_) and random_.random() < 0.3 else "qwen2"
        begin = time.perf_counter()
        try:
            counts[attempt(struck, folder / "out.gguf", registry, pre, run=random_.random() < 0.3)] += 1
        except Exception:
            faults.append(f"{number} {base.name}: {traceback.format_exc(limit=-6)}")
        if time.perf_counter() - begin > SLOWEST_S:
            faults.append(f"{number} {base.name}: took {time.perf_counter() - begin:.1f} s")
        shutil.rmtree(struck)
    return counts, faults


def main() -> None:
    """Print what came of it as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        counts, faults = fuzz(int(sys.argv[1]), int(sys.argv[2]), Path(folder))
    print(json.dumps({"counts": dict(counts), "faults": faults}))


if __name__ == "__main__":
    main()
