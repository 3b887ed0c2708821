from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TinyModel

from kinetic_core.engine.sizing import _control_group_bytes, available_memory_bytes, choose_sizes
from kinetic_core.errors import CapacityError
from kinetic_core.program import KVLayer, Program, RecurrentState, Value

MIB = 2**20


def program_of(kv_bytes: int, state_bytes: int) -> Program:
    """f16 keys and values of `kv_bytes` per position; states of `state_bytes` per sequence."""
    layers = (KVLayer(0, 1, kv_bytes // 4),) if kv_bytes else ()
    states = (RecurrentState(0, "state", (state_bytes // 4,)),) if state_bytes else ()
    return Program((), 0, (), layers, states, Value(0, 1), Value(0, 1))


def sizes(program: Program, context: int, memory_mib: int, **options: int | None):  # type: ignore[no-untyped-def]
    return choose_sizes(
        program, context, weight_bytes=100 * MIB, kv_type="f16", memory_bytes=memory_mib * MIB, **options
    )


def test_plenty_of_memory_gives_every_sequence_a_whole_context() -> None:
    chosen = sizes(program_of(4096, 0), 8192, 100_000)
    assert (chosen.context_length, chosen.parallel, chosen.n_blocks) == (8192, 16, 16 * 32)
    assert chosen.kv_bytes == 16 * 8192 * 4096


def test_the_default_context_is_at_most_32k_and_at_most_the_models() -> None:
    program = program_of(4096, 0)
    assert sizes(program, 131072, 100_000).context_length == 32768
    assert sizes(program, 500, 100_000).context_length == 500
    assert sizes(program, 131072, 100_000, ctx=131072).context_length == 131072


def test_little_memory_makes_the_pool_and_then_the_context_smaller() -> None:
    program = program_of(4096, 0)  # 1 MiB a block, 128 MiB a context of 32k
    chosen = sizes(program, 32768, 100 + 600)
    assert (chosen.context_length, chosen.n_blocks) == (32768, 300)
    chosen = sizes(program, 32768, 100 + 100)
    assert (chosen.context_length, chosen.n_blocks) == (50 * 256, 50)
    chosen = sizes(program, 32768, 100 + 150, ctx=32768)  # asked for: may take more than half of what is free
    assert (chosen.context_length, chosen.n_blocks) == (32768, 128)
    with pytest.raises(CapacityError, match=r"32768 tokens.*--ctx"):
        sizes(program, 32768, 100 + 100, ctx=32768)


def test_large_states_make_fewer_sequences() -> None:
    program = program_of(4096, 50 * MIB)
    assert sizes(program, 1024, 100 + 800).parallel == 4
    assert sizes(program, 1024, 100 + 120).parallel == 1
    assert sizes(program, 1024, 100 + 800, parallel=7).parallel == 7
    with pytest.raises(CapacityError):
        sizes(program, 1024, 100 + 10)


def test_a_program_without_attention_needs_no_memory_for_positions() -> None:
    chosen = sizes(program_of(0, 4096), 100_000, 200)
    assert (chosen.context_length, chosen.kv_bytes) == (32768, 0)
    assert chosen.n_blocks >= 128


def test_every_choice_makes_a_valid_engine(predictable: TinyModel) -> None:
    for memory in (101, 110, 200, 5000):
        for parallel in (None, 1, 3, 40, 256):
            chosen = sizes(predictable.program, 2048, memory, parallel=parallel)
            options = chosen.engine_options(has_states=True, kv_type="f16")
            assert options.max_sequences == chosen.parallel
            assert options.max_rows >= 256 + chosen.parallel


def test_available_memory_is_plausible() -> None:
    assert 64 * MIB < available_memory_bytes() < 2**62
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        total = int(meminfo.read_text().split("MemTotal:")[1].split()[0]) * 1024
        assert available_memory_bytes() <= total


def test_a_containers_limit_counts_cached_files_as_free(tmp_path: Path) -> None:
    def left(limit: str, used: int) -> int:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text("anon 300\nfile 650\ninactive_file 400\nactive_file 200\n")
        return _control_group_bytes(str(tmp_path))

    assert left("1000", 950) == 650
    assert left("300", 950) == 0
    assert left("max", 950) == _control_group_bytes(str(tmp_path / "none")) == 2**62
