"""Opening model files: split sets, views, released pages, digests, and what is not a model file."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_gguf as raw

from kinetic_core.errors import GGUFError, MetadataError, ModelError, ModelNotFoundError, TensorError
from kinetic_core.gguf import (
    GGMLType,
    MemoryTensors,
    RawTensor,
    TensorSource,
    check_block_count,
    gguf_bytes,
    open_model_file,
    read_tensor,
    write_gguf,
)

DATA = Path(__file__).parents[1] / "data"
TENSORS = {f"blk.{index}.weight": np.arange(index, index + 64, dtype=np.float32) for index in range(6)}


def part_path(directory: Path, number: int, count: int = 3, stem: str = "model") -> Path:
    return directory / f"{stem}-{number:05d}-of-{count:05d}.gguf"


def write_part(directory: Path, number: int, count: int = 3, **changes: Any) -> Path:
    """Part `number` (from 1) of a set of six tensors; `changes`: metadata, tensors, or a split key's last word."""
    names = list(TENSORS)[(number - 1) * 2 : number * 2]
    metadata: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 6} if number == 1 else {}
    metadata["split.no"] = np.uint16(changes.get("no", number - 1))
    metadata["split.count"] = np.uint16(changes.get("count", count))
    metadata["split.tensors.count"] = np.int32(changes.get("tensors_count", 6))
    metadata.update(changes.get("metadata", {}))
    path = part_path(directory, number, count)
    write_gguf(path, metadata, {name: TENSORS[name] for name in names} | changes.get("tensors", {}))
    return path


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [write_part(tmp_path, number) for number in (1, 2, 3)]


def refused(path: Path) -> str:
    with pytest.raises(GGUFError) as caught:
        open_model_file(path)
    return str(caught.value)


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_g10_any_part_opens_the_whole_set(parts: list[Path], opened: int) -> None:
    with open_model_file(parts[opened]) as model:
        assert model.paths == tuple(parts) and model.path == parts[0]
        assert model.architecture == "llama"
        assert list(model.tensors) == list(TENSORS)
        for name, array in TENSORS.items():
            np.testing.assert_array_equal(read_tensor(model, name), array)
        assert [info.part for info in model.tensors.values()] == [0, 0, 1, 1, 2, 2]
        assert check_block_count(model.metadata.prefixed("llama"), model.tensors) == 6
        assert model.n_bytes == sum(path.stat().st_size for path in parts)


def test_a_set_of_two_parts(tmp_path: Path) -> None:
    paths = [write_part(tmp_path, number, count=2, tensors_count=4) for number in (1, 2)]
    with open_model_file(paths[1]) as model:
        assert model.paths == tuple(paths) and len(model.tensors) == 4


def test_g10_missing_part(parts: list[Path]) -> None:
    parts[2].unlink()
    for path in parts[:2]:
        text = refused(path)
        assert "part 3 of 3 of the split set is missing" in text and str(parts[2]) in text


def test_g10_part_that_claims_another_count(parts: list[Path], tmp_path: Path) -> None:
    write_part(tmp_path, 2, count=4)
    part_path(tmp_path, 2, 4).replace(parts[1])
    for opened in (0, 2):
        text = refused(parts[opened])
        assert "part 2 of 3 claims another number of parts" in text and "got split.count 4" in text
        assert str(parts[1]) in text
    assert "name does not fit" in refused(parts[1])


def test_g10_two_parts_with_one_number(parts: list[Path], tmp_path: Path) -> None:
    write_part(tmp_path, 3, no=1)
    text = refused(parts[0])
    assert "part 3 of 3 is another part" in text and "got split.no 1" in text and str(parts[2]) in text
    assert "name does not fit" in refused(parts[2])


def test_g10_one_tensor_twice(parts: list[Path], tmp_path: Path) -> None:
    write_part(tmp_path, 1, tensors_count=7)
    write_part(tmp_path, 2, tensors_count=7)
    write_part(tmp_path, 3, tensors_count=7, tensors={"blk.2.weight": np.ones(4, np.float32)})
    text = refused(parts[1])
    assert "'blk.2.weight' is in part 2 and in part 3 of 3" in text and str(parts[2]) in text


def test_g10_hyphens_alone_make_no_split_set(tmp_path: Path) -> None:
    for name in ("best-of-breed.gguf", "model-00002-of-00003.gguf"):
        write_gguf(tmp_path / name, {"general.architecture": "llama"}, TENSORS)
        with open_model_file(tmp_path / name) as model:
            assert model.paths == (tmp_path / name,) and len(model.tensors) == 6
    only = write_part(tmp_path, 1, count=1, tensors_count=2)
    with open_model_file(only.rename(tmp_path / "renamed.gguf")) as model:
        assert len(model.tensors) == 2


def test_split_sets_agree_about_everything(parts: list[Path], tmp_path: Path) -> None:
    for tensors_count in (5, 7):
        write_part(tmp_path, 2, tensors_count=tensors_count)
        assert "part 2 of 3 claims another number of tensors" in refused(parts[0])
    write_part(tmp_path, 2, metadata={"general.architecture": "qwen35"})
    assert "part 2 of 3 has another value of key 'general.architecture'" in refused(parts[0])
    write_part(tmp_path, 2, metadata={"general.architecture": "llama", "extra": [1, 2]})
    with open_model_file(parts[0]) as model:
        assert model.metadata.get_ints("extra").tolist() == [1, 2]
    write_part(tmp_path, 3, metadata={"extra": [1, 3]})
    assert "part 3 of 3 has another value of key 'extra'" in refused(parts[0])
    parts[1].write_bytes(parts[1].read_bytes()[:-200])
    assert str(parts[1]) in refused(parts[0])
    parts[1].write_bytes(b"")
    assert "truncated header" in refused(parts[0])


@pytest.mark.parametrize("first", [{}, {"general.alignment": 32}])
def test_parts_may_have_their_own_alignment(parts: list[Path], tmp_path: Path, first: dict[str, int]) -> None:
    write_part(tmp_path, 1, metadata=first)
    write_part(tmp_path, 2, metadata={"general.alignment": 64})
    with open_model_file(parts[0]) as model:
        assert [header.alignment for header in model.headers] == [32, 64, 32]
        assert model.metadata.raw.get("general.alignment") == first.get("general.alignment")
        np.testing.assert_array_equal(read_tensor(model, "blk.3.weight"), TENSORS["blk.3.weight"])


@pytest.mark.parametrize("value", ["3", -1, 70000, 1.0, True, [3]])
def test_split_keys_of_another_type_or_range(parts: list[Path], tmp_path: Path, value: Any) -> None:
    for key in ("split.count", "split.no", "split.tensors.count"):
        if key == "split.tensors.count" and value == 70000:
            continue
        path = write_part(tmp_path, 2, metadata={key: value})
        assert key in refused(path)


def test_split_keys_that_are_missing(parts: list[Path]) -> None:
    write_gguf(parts[1], {"split.count": 3}, {})
    text = refused(parts[1])
    assert "bad key 'split.no'" in text and "got no such key" in text
    write_gguf(parts[1], {}, {})
    text = refused(parts[0])
    assert "bad key 'split.count'" in text and "got no such key" in text and str(parts[1]) in text


def test_renamed_part_says_which_name_it_needs(parts: list[Path], tmp_path: Path) -> None:
    moved = parts[1].rename(tmp_path / "second.gguf")
    assert "-00002-of-00003.gguf" in refused(moved)


@pytest.mark.parametrize("name", ["llama-f32", "llama-q8_0", "llama-q4_k_m", "llama3rope-f32"])
def test_golden_files_open(name: str) -> None:
    with open_model_file(DATA / f"{name}.gguf") as model:
        assert model.architecture == "llama"
        n_blocks = check_block_count(model.metadata.prefixed("llama"), model.tensors)
        hidden = model.metadata.get_int("llama.embedding_length")
        assert len(model.metadata.get_strs("tokenizer.ggml.tokens")) == 1024
        assert model.tensors["token_embd.weight"].shape == (1024, hidden)
        for index in range(n_blocks):
            assert model.tensors[f"blk.{index}.attn_norm.weight"].shape == (hidden,)
        for name in model.tensors:
            assert np.isfinite(read_tensor(model, name)).all()


def test_quantized_files_are_near_the_float_file() -> None:
    with open_model_file(DATA / "llama-f32.gguf") as exact:
        for name, limit in (("llama-q8_0", 0.01), ("llama-q4_k_m", 0.1)):
            with open_model_file(DATA / f"{name}.gguf") as model:
                assert set(model.tensors) == set(exact.tensors)
                for tensor in exact.tensors:
                    a, b = read_tensor(exact, tensor), read_tensor(model, tensor)
                    assert np.sqrt(np.mean((a - b) ** 2)) <= limit * a.std(), tensor


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    path.write_bytes(raw.good_file())
    return path


def test_views_are_read_only_and_bounded(good: Path) -> None:
    with open_model_file(good) as model:
        view = model.tensor_bytes("b")
        assert view.dtype == np.uint8 and view.tolist() == list(range(128, 256))
        with pytest.raises(ValueError):
            view[0] = 1
        with pytest.raises(TensorError, match="'c'"):
            model.tensor_bytes("c")
        with pytest.raises(TensorError, match="'c'"):
            model.release("c")


def test_views_outlive_the_file_object(good: Path) -> None:
    model = open_model_file(good)
    view = model.tensor_bytes("b")
    model.close()
    model.close()
    assert view.tolist() == list(range(128, 256))
    for use in (lambda: model.tensor_bytes("b"), lambda: model.release("b"), model.digest):
        with pytest.raises(ModelError, match="closed"):
            use()


def test_digest_is_the_sha256_of_the_file(good: Path) -> None:
    seen: list[tuple[int, int]] = []
    with open_model_file(good) as model:
        expected = hashlib.sha256(good.read_bytes()).hexdigest()
        assert model.digest(lambda done, total: seen.append((done, total))) == expected
        assert seen[-1] == (model.n_bytes, model.n_bytes)
        assert model.digest() == expected


def test_digest_reads_in_chunks_and_may_be_given_up(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    write_gguf(path, {}, {"t": np.arange(3_000_000, dtype=np.float32)})
    seen: list[int] = []

    class GiveUpError(Exception):
        pass

    def give_up(done: int, total: int) -> None:
        raise GiveUpError

    with open_model_file(path) as model:
        with pytest.raises(GiveUpError):
            model.digest(give_up)
        assert model.digest(lambda done, total: seen.append(done)) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(seen) >= 3 and seen == sorted(set(seen)) and seen[-1] == path.stat().st_size


def test_digest_of_a_split_set(parts: list[Path]) -> None:
    seen: list[tuple[int, int]] = []
    with open_model_file(parts[1]) as model:
        digests = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in parts)
        assert model.digest(lambda *at: seen.append(at)) == hashlib.sha256(digests).hexdigest()
        assert seen[-1] == (model.n_bytes, model.n_bytes) and len(seen) == 3


def test_digest_notices_that_the_file_changed(good: Path) -> None:
    with open_model_file(good) as model:
        with open(good, "ab") as file:
            file.write(b"more")
        with pytest.raises(GGUFError, match="changed while it was in use"):
            model.digest()
    with open_model_file(good) as model:
        with open(good, "ab") as file:
            file.write(b"more")
        os.utime(good, ns=(1, model.identity[0].modified_ns))
        with pytest.raises(GGUFError, match="changed while it was in use"):
            model.digest()
    with open_model_file(good) as model:
        os.utime(good, ns=(1, 1))
        with pytest.raises(GGUFError, match="changed while it was in use"):
            model.digest()


def test_identity_changes_with_the_file(good: Path) -> None:
    with open_model_file(good) as one, open_model_file(good) as two:
        assert one.identity == two.identity
    os.utime(good, ns=(1, 1))
    with open_model_file(good) as three:
        assert three.identity != one.identity
        assert three.identity[0].n_bytes == good.stat().st_size


def resident_bytes(path: Path) -> int:
    """Bytes of the file that are mapped into this process and present."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")
def test_release_gives_memory_back(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    values = np.arange(2**20, dtype=np.float32)
    write_gguf(path, {}, {"before": np.ones(1000, np.float32), "t": values, "after": np.ones(1000, np.float32)})
    with open_model_file(path) as model:
        view = model.tensor_bytes("t")
        assert int(view.sum(dtype=np.int64)) == int(values.view(np.uint8).sum(dtype=np.int64))
        before = resident_bytes(path)
        assert before >= values.nbytes
        released = model.release("t")
        info = model.tensors["t"]
        assert info.offset % mmap.PAGESIZE and (info.offset + info.n_bytes) % mmap.PAGESIZE  # its ends share pages
        assert released == info.n_bytes - mmap.PAGESIZE  # the file's first and last page of it stay
        assert resident_bytes(path) <= before - released + 4 * mmap.PAGESIZE
        np.testing.assert_array_equal(view, values.view(np.uint8))  # the same view reads the file again
        assert model.release("before") == 0  # smaller than a page: its neighbours live there


def test_release_without_madvise_is_no_error(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_DONTNEED", raising=False)
    with open_model_file(good) as model:
        assert model.release("b") == 0


def test_what_is_not_a_model_file(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.gguf", tmp_path / "none" / "none.gguf", "nul\0byte"):
        with pytest.raises(ModelNotFoundError, match="no such model file"):
            open_model_file(missing)
    with pytest.raises(GGUFError, match="a directory"):
        open_model_file(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    assert "truncated header" in refused(tmp_path / "file")
    with pytest.raises(ModelNotFoundError):
        open_model_file(tmp_path / "file" / "below.gguf")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_before_it_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refused(tmp_path / "pipe.gguf")


def test_architecture_is_named(tmp_path: Path) -> None:
    for metadata, text in (({}, "missing"), ({"general.architecture": 5}, "expected a string")):
        write_gguf(tmp_path / "m.gguf", metadata, {})
        with open_model_file(tmp_path / "m.gguf") as model, pytest.raises(MetadataError, match=text):
            _ = model.architecture


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_failed_opens_leave_no_handle(parts: list[Path], tmp_path: Path) -> None:
    count = len(list(Path("/proc/self/fd").iterdir()))
    errors = []  # kept: an error's traceback keeps what the failed call left open
    for last in (b"GGUF", b"", gguf_bytes({"split.count": "3"}, {}), gguf_bytes({"split.count": 3}, {})):
        parts[2].write_bytes(last)
        for path in parts:
            with pytest.raises(GGUFError) as caught:
                open_model_file(path)
            errors.append(caught)
    parts[2].unlink()
    with pytest.raises(GGUFError) as caught:
        open_model_file(parts[0])
    errors.append(caught)
    assert len(list(Path("/proc/self/fd").iterdir())) == count


def test_reading_needs_no_slow_import() -> None:
    code = (
        "import sys; from kinetic_core.gguf import open_model_file; "
        f"open_model_file({str(DATA / 'llama-q8_0.gguf')!r}).tensor_bytes('output_norm.weight'); "
        "print([name for name in ('gguf', 'numba', 'cupy') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_sources_in_memory_and_on_disk_are_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    q8 = RawTensor(rng.integers(0, 100, 4 * 34, np.uint8), GGMLType.Q8_0, (2, 64))
    tensors = {"norm": np.linspace(0, 1, 5, dtype=np.float32), "q": q8, "h": np.ones((2, 2), np.float16)}
    metadata = {"general.architecture": "tiny", "tiny.block_count": 2, "tiny.sizes": [1, 2]}
    write_gguf(tmp_path / "m.gguf", metadata, tensors)
    memory = MemoryTensors(metadata, tensors)
    with open_model_file(tmp_path / "m.gguf") as file:
        assert isinstance(file, TensorSource) and isinstance(memory, TensorSource)
        assert list(file.tensors) == list(memory.tensors)
        assert file.metadata.get_ints("tiny.sizes").tolist() == memory.metadata.get_ints("tiny.sizes").tolist()
        for name in tensors:
            a, b = file.tensors[name], memory.tensors[name]
            assert (a.name, a.shape, a.type, a.n_bytes) == (b.name, b.shape, b.type, b.n_bytes)
            np.testing.assert_array_equal(file.tensor_bytes(name), memory.tensor_bytes(name))
            np.testing.assert_array_equal(read_tensor(file, name), read_tensor(memory, name))
    assert memory.release("q") == 0
    with pytest.raises(ValueError):
        memory.tensor_bytes("q")[0] = 1
    for use in (memory.tensor_bytes, memory.release):
        with pytest.raises(TensorError, match="'none'"):
            use("none")


def test_memory_tensors_are_copies_and_checked() -> None:
    array = np.zeros(4, np.float32)
    memory = MemoryTensors({}, {"a": array})
    array[0] = 1
    assert not read_tensor(memory, "a").any()
    big_endian = MemoryTensors({}, {"a": np.array([1.5, 2.5], ">f4")})
    assert read_tensor(big_endian, "a").tolist() == [1.5, 2.5]
    for bad in (np.zeros(4, np.complex64), np.zeros(4, np.uint8), np.zeros((0, 4), np.float32), np.float32(1)):
        with pytest.raises(TensorError, match="cannot be stored"):
            MemoryTensors({}, {"a": np.asarray(bad)})
    for bad_raw in (
        RawTensor(bytes(33), GGMLType.Q8_0, (32,)),
        RawTensor(bytes(35), GGMLType.Q8_0, (32,)),
        RawTensor(bytes(34), GGMLType.Q8_0, (16, 2)),
    ):
        with pytest.raises(TensorError):
            MemoryTensors({}, {"a": bad_raw})
