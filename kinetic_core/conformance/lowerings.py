"""Checks across processes: the same results where kernels are compiled for a plainer CPU.

Run as a module it prints the digests of a family's models as one JSON document.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from typing import Any

from kinetic_core.conformance.models import ModelFamily, TinyModel, importable
from kinetic_core.conformance.rows import folded
from kinetic_core.conformance.steps import Part, make_batch, prompt, run, step
from kinetic_core.conformance.suite import Fault

HIDDEN_HOST = {"KINETIC_SIMD": "generic", "NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": ""}
"""Environment of a process whose compiler does not know what this CPU can do."""
TIMEOUT_S = 900.0


def digest(model: TinyModel) -> str:
    """Of a prompt over the edge of a block, drafts, a commit, decode, and the recurrent states."""
    executable = model.executable()
    rows = [prompt(executable, model.tokens(1, 263), [250, 12, 1])]
    table = (0, 1)
    if model.backend.capabilities.supports_drafts:
        tokens = folded((5, 6, 7), model.vocab)
        batch = make_batch(Part(model.tokens(2, 1), 263, table, drafts=tuple(zip(tokens, (0, 1, 1), strict=True))))
        rows += run(executable, batch)
        executable.commit(batch.sequences[0], (1, 3))
        rows += step(executable, Part(model.tokens(3, 1), 266, table))
    data = b"".join(array.tobytes() for array in rows) + executable.read_slot(0)
    return hashlib.sha256(data).hexdigest()


def lowerings_agree(family: ModelFamily, label: str) -> None:
    """This process against one that hides the CPU's features."""
    got = family.digests("generic").get(label)
    if got is None:
        raise Fault(f"another process did not run the model {label}")
    if digest(family.model(label)) != got:
        raise Fault("a process that compiles for a plain x86-64 CPU (KINETIC_SIMD=generic) gives other bits")


def digests_elsewhere(family: ModelFamily, lowering: str) -> dict[str, str]:
    """Label -> digest of every model, computed in another process. Raises Fault when that process fails."""
    assert lowering == "generic"
    what = {
        "architecture": importable(family.architecture),
        "name": family.name,
        "backend": importable(family.backend),
        "formats": family.formats,
        "variants": list(family.variants),
    }
    environment = {**os.environ, **HIDDEN_HOST, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "kinetic_core.conformance.lowerings", json.dumps(what)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise Fault(f"a process with KINETIC_SIMD=generic failed: {' '.join(done.stderr.split())[-400:]}")
    digests: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return digests


def _load(target: str) -> Any:
    module, _, qualified = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in qualified.split("."):
        value = getattr(value, part)
    return value


def main(arguments: str) -> None:
    """Print label -> digest of the models that `arguments`, a JSON document, describes."""
    what = json.loads(arguments)
    names = frozenset(what["variants"])
    family = ModelFamily(
        _load(what["architecture"]),
        what["name"],
        _load(what["backend"]),
        what["formats"],
        lambda variant: variant.name in names,
    )
    digests: dict[str, str] = {}
    for label in family.labels():
        try:
            digests[label] = digest(family.model(label))
        except Exception as error:  # one model that does not run must not hide the others' digests
            print(f"{label}: {type(error).__name__}: {error}", file=sys.stderr)
    family.close()
    print(json.dumps(digests))


if __name__ == "__main__":
    main(sys.argv[1])
