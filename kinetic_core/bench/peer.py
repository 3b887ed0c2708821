"""llama.cpp on the same file, through the bindings `xllamacpp`, in a process of its own.

The child answers one JSON line per run, so that its runs and ours can alternate; its model stays loaded in between.
`python -m kinetic_core.bench.peer` is the child.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kinetic_core.errors import BackendError, describe

PACKAGE = "xllamacpp"


def bench_tokens(n_tokens: int, run: int, vocab_size: int) -> list[int]:
    """The prompt of a run: other tokens in every run, the same for both engines."""
    return [1 + (7 * i + 13 * run) % min(200, vocab_size - 1) for i in range(n_tokens)]


class Peer:
    """llama.cpp with a model loaded. Raises BackendError when it is not installed or fails."""

    def __init__(self, path: Path, *, n_threads: int, n_prompt: int, n_predict: int, vocab_size: int) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise BackendError(describe("llama.cpp's bindings are not installed", hint=f"pip install {PACKAGE}"))
        settings = {
            "path": str(path),
            "n_threads": n_threads,
            "n_prompt": n_prompt,
            "n_predict": n_predict,
            "vocab_size": vocab_size,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kinetic_core.bench.peer", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ask("ready")

    def run(self, run: int) -> dict[str, float]:
        """One prompt and its answer: prompt_tok_s and decode_tok_s, by llama.cpp's own timings."""
        return self._ask(str(run))

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise BackendError(describe("llama.cpp ended", got=f"exit status {self._process.wait()}"))
        return json.loads(answer)

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _child(settings: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints where it likes
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.n_ctx = settings["n_prompt"] + settings["n_predict"] + 64
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["n_threads"]
    params.n_parallel = 1
    params.cache_prompt = False
    params.fit_params = False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    for line in sys.stdin:
        result: dict[str, float] = {}
        if line.strip() != "ready":
            tokens = bench_tokens(settings["n_prompt"], int(line), settings["vocab_size"])
            answer = server.handle_completions(
                {
                    "prompt": tokens,
                    "n_predict": settings["n_predict"],
                    "temperature": 0,
                    "cache_prompt": False,
                    "ignore_eos": True,
                }
            )
            timings = answer["timings"]
            result = {"prompt_tok_s": timings["prompt_per_second"], "decode_tok_s": timings["predicted_per_second"]}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
