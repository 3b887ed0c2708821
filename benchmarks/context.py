"""Decode speed after long texts, against that after a short one.

    python benchmarks/context.py MODEL [--lengths 100,8000] [--predict 32] [--rounds 5] [--threads N] [--json]

Each round measures every length once, in turn, so that noise meets all of them; the ratios are medians over rounds.
The text before is made of random tokens and run once per length; every round continues it from the same place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

import kinetic_core
from kinetic_core.bench.peer import bench_tokens
from kinetic_core.interfaces import HeadRequest, RowBatch, SequenceRows
from kinetic_core.interfaces.batch import BLOCK_TOKENS


class Text:
    """A sequence with `length` tokens whose next steps are timed."""

    def __init__(self, model: kinetic_core.Model, length: int, n_predict: int, slot: int, first_block: int) -> None:
        self.length = length
        self._model = model
        self._n_predict = n_predict
        self._slot = slot
        self.n_blocks = -(-(length + n_predict) // BLOCK_TOKENS)
        self._table = np.arange(first_block, first_block + self.n_blocks, dtype=np.int32)
        tokens = bench_tokens(length, length, model.vocab_size)
        for start in range(0, length, BLOCK_TOKENS):
            self._run(tokens[start : start + BLOCK_TOKENS], start, [])
        # Every round ends where it began: positions are written again, and the states copied back.
        self._kept = slot + 1
        model.executable.copy_slot(slot, self._kept)

    def _run(self, tokens: Any, start: int, heads: list[int]) -> None:
        self._model.executable.run(
            RowBatch(
                np.array(tokens, np.int32),
                np.arange(start, start + len(tokens), dtype=np.int32),
                (SequenceRows(0, start, len(tokens), self._table, self._slot),),
                [HeadRequest(row, 1) for row in heads],
            )
        )

    def tok_s(self) -> float:
        """Tokens per second of the next `n_predict` steps of one row."""
        began = time.perf_counter()
        for step in range(self._n_predict):
            self._run([step + 1], self.length + step, [0])
        seconds = time.perf_counter() - began
        self._model.executable.copy_slot(self._kept, self._slot)
        return self._n_predict / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--lengths", default="100,8000")
    parser.add_argument("--predict", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    n_blocks = sum(-(-(length + options.predict) // BLOCK_TOKENS) for length in lengths)
    with kinetic_core.load(
        options.model, threads=options.threads, ctx=n_blocks * BLOCK_TOKENS, parallel=2 * len(lengths), draft=False
    ) as model:
        texts: list[Text] = []
        for number, length in enumerate(lengths):
            first_block = sum(text.n_blocks for text in texts)
            texts.append(Text(model, length, options.predict, 2 * number, first_block))
        for text in texts:
            text.tok_s()
        rounds = [[text.tok_s() for text in texts] for _ in range(options.rounds)]
    result = {
        str(length): {
            "decode_tok_s": statistics.median(speeds[at] for speeds in rounds),
            "share_of_shortest": statistics.median(speeds[at] / speeds[0] for speeds in rounds),
        }
        for at, length in enumerate(lengths)
    }
    if options.json:
        print(json.dumps({"model": options.model, "rounds": options.rounds, "lengths": result}))
        return
    for name, figures in result.items():
        print(f"after {name:>6} tokens: {figures['decode_tok_s']:8.1f} tok/s, {figures['share_of_shortest']:.2f}")


if __name__ == "__main__":
    main()
