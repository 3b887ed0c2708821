"""Measurements of a loaded model: what `kinetic bench` prints.

    with kinetic_core.load("smollm2") as model:
        print(measure(model, BenchOptions(runs=5))["decode_tok_s"])

docs/performance.md says what each figure means.
"""

from kinetic_core.bench.drafted import measure_drafting
from kinetic_core.bench.measure import BenchOptions, measure, measure_first_token, measure_profile, measure_streams
from kinetic_core.bench.work import bytes_per_token

__all__ = [
    "BenchOptions",
    "bytes_per_token",
    "measure",
    "measure_drafting",
    "measure_first_token",
    "measure_profile",
    "measure_streams",
]
