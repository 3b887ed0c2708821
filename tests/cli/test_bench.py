"""`kinetic bench`: its keys, and what each figure is made of."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import kinetic_core
from kinetic_core.bench import (
    BenchOptions,
    bytes_per_token,
    measure,
    measure_drafting,
    measure_first_token,
    measure_profile,
    measure_streams,
)
from kinetic_core.bench.drafted import Pair, describe_pairs
from kinetic_core.bench.measure import rows_seconds
from kinetic_core.bench.peer import Peer, bench_tokens
from kinetic_core.bench.workloads import WORKLOADS, Workload, share_in_loops
from kinetic_core.engine.model import Model
from kinetic_core.engine.request import TokenLogprob
from kinetic_core.errors import BackendError, TemplateError
from kinetic_core.program.record import record_program
from kinetic_core.reference.head import FullHead
from kinetic_core.reference.random_model import random_model
from kinetic_core.reference.tiny_hybrid import TinyHybrid

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(autouse=True)
def short_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes a letter for a token, and its time with each."""
    short = [attrs.evolve(workload, instruction="ab ab", answer="ab ab ab ab") for workload in WORKLOADS]
    monkeypatch.setattr("kinetic_core.bench.drafted.WORKLOADS", short)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Model]:
    with kinetic_core.load("tiny-hybrid", backend="reference") as model:
        yield model


def test_the_json_has_every_key(kinetic: Any) -> None:
    words = ("--prompt", "8", "--predict", "4", "--runs", "1", "--answer", "8", "--streams", "2", "--json")
    result = json.loads(kinetic("bench", "tiny-hybrid", "--backend", "reference", *words).out)
    for key in ("load_s", "prompt_tok_s", "decode_tok_s", "bytes_per_token", "bandwidth_gb_s", "first_token_s"):
        assert result[key] > 0, key
    assert list(result["rows_cost"]) == ["1", "2", "4", "8", "16"] and result["rows_cost"]["1"] == 1.0
    expected = result["decode_tok_s"] * result["bytes_per_token"] / 1e9 / result["bandwidth_gb_s"]
    assert result["bandwidth_share"] == pytest.approx(expected, rel=1e-6)
    assert result["streams"]["streams"] == 2 and "peer" not in result
    assert result["drafted_identical"] is True
    assert result["workloads_skipped"] == result["drafter_failed"] == []
    assert list(result["workloads"]) == ["rewrite code", "quote passage", "fill JSON"]
    for cases in result["workloads"].values():
        assert list(cases) == ["temperature 0", "temperature 0.8", "forced"]
        for figures in cases.values():
            assert figures["plain_tok_s"] > 0 and figures["drafted_tok_s"] > 0 and figures["tokens_per_step"] >= 1
    assert result["threads"] == 1 and result["prompt_tokens"] == 8 and result["model"] == "tiny-hybrid"


def test_the_table_for_people(kinetic: Any) -> None:
    words = ("--backend", "reference", "--prompt", "4", "--predict", "2", "--runs", "1", "--answer", "4")
    ended = kinetic("bench", "tiny-hybrid", *words)
    assert ended.status == 0
    assert "drafted output identical to plain decoding: yes\n" in ended.out
    assert "fill JSON, forced:" in ended.out
    plain = kinetic("bench", "tiny-hybrid", *words, "--no-draft")
    assert plain.status == 0 and "drafted" not in plain.out
    for word in ("start to first token:", "prompt of 4:", "decode:", "read bandwidth:", "cost of rows:", "GB/s"):
        assert word in ended.out


def test_answers_that_differ_are_a_failure(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter cannot change an answer, so the answer is changed behind the bench's back."""
    from kinetic_core.engine.sampler import Sampler

    honest = Sampler.choose

    def lying(self: Sampler, executable: Any, output: int, *others: Any) -> Any:
        choice = honest(self, executable, output, *others)
        return attrs.evolve(choice, token_id=65) if output > 0 else choice

    monkeypatch.setattr(Sampler, "choose", lying)
    monkeypatch.setattr("kinetic_core.engine.drafting.StepCosts.seconds", lambda _self, _n_rows: 1.0)
    words = ("--backend", "reference", "--prompt", "4", "--predict", "2", "--runs", "1", "--answer", "11")
    ended = kinetic("bench", "tiny-hybrid", *words)
    assert ended.status == 1
    assert "drafted output identical to plain decoding: no\n" in ended.out


def quiet(_what: str, _share: float) -> None:
    """No progress is shown."""


def only(name: str = "short", answer: str = "ab ab ab ab") -> list[Workload]:
    """One workload of few letters."""
    return [Workload(name, "ab ab", answer)]


def by_one_bit(found: TokenLogprob) -> TokenLogprob:
    """The token's own log-probability is the next lower number."""
    return attrs.evolve(found, logprob=math.nextafter(found.logprob, -math.inf))


def an_alternative_by_one_bit(found: TokenLogprob) -> TokenLogprob:
    """That of the third best token is."""
    token_id, token_bytes, logprob = found.top[2]
    changed = (token_id, token_bytes, math.nextafter(logprob, -math.inf))
    return attrs.evolve(found, top=(*found.top[:2], changed, *found.top[3:]))


def another_alternative(found: TokenLogprob) -> TokenLogprob:
    """The last of the best tokens is another, equally likely."""
    token_id, token_bytes, logprob = found.top[-1]
    return attrs.evolve(found, top=(*found.top[:-1], (token_id + 1, token_bytes, logprob)))


Change = Callable[[TokenLogprob], TokenLogprob]


@pytest.fixture
def change_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], list[tuple[TokenLogprob, TokenLogprob]]]:
    """Of one drafted answer one log-probability is wrong, at its 7th token; every token and text is right."""
    from kinetic_core.engine import engine

    honest, honest_logprob = engine.Engine._choose, engine.token_logprob
    choosing: list[Any] = []
    changed: list[tuple[TokenLogprob, TokenLogprob]] = []

    def choose(self: Any, sequence: Any, output: int, top_k: int | None) -> Any:
        choosing.append(sequence)
        try:
            return honest(self, sequence, output, top_k)
        finally:
            choosing.pop()

    def change_one(change: Change) -> list[tuple[TokenLogprob, TokenLogprob]]:
        def lying(*arguments: Any) -> TokenLogprob:
            found = honest_logprob(*arguments)
            sequence = choosing[-1]
            if changed or not sequence.active.request.draft or sequence.n_generated != 6:
                return found
            changed.append((found, change(found)))
            return changed[0][1]

        monkeypatch.setattr(engine.Engine, "_choose", choose)
        monkeypatch.setattr(engine, "token_logprob", lying)
        return changed

    return change_one


@pytest.mark.parametrize("change", [by_one_bit, an_alternative_by_one_bit, another_alternative])
def test_a_log_probability_that_differs_is_seen(tiny: Model, change_one: Any, change: Change) -> None:
    changed = change_one(change)
    result = measure_drafting(tiny, 8, quiet, only(), [0.0])
    ((before, after),) = changed
    assert before != after and before.token_id == after.token_id
    assert result["drafted_identical"] is False
    assert measure_drafting(tiny, 8, quiet, only(), [0.0])["drafted_identical"] is True  # it was the only one


def test_a_log_probability_that_differs_is_a_failure(
    kinetic: Any, change_one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinetic_core.bench.measure_first_token", lambda _arguments, _runs: 1.0)
    monkeypatch.setattr("kinetic_core.bench.drafted.WORKLOADS", only())
    changed = change_one(by_one_bit)
    words = ("--backend", "reference", "--prompt", "4", "--predict", "2", "--runs", "1", "--answer", "8")
    ended = kinetic("bench", "tiny-hybrid", *words)
    assert len(changed) == 1
    assert ended.status == 1
    assert "drafted output identical to plain decoding: no\n" in ended.out


def test_log_probabilities_are_asked_for_where_nothing_is_timed(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from kinetic_core.bench import drafted

    honest, asked = drafted.run_pair, []

    def run_pair(model: Model, prompt_ids: Sequence[int], **options: Any) -> Pair:
        asked.append((options.get("max_tokens"), options.get("logprobs")))
        return honest(model, prompt_ids, **options)

    monkeypatch.setattr(drafted, "run_pair", run_pair)
    result = measure_drafting(tiny, 40, quiet, only(answer="ab " * 20), [0.0])
    assert result["drafted_identical"] is True
    assert asked == [
        (16, None),
        (32, 5),
        (40, None),
        (32, 5),
        (None, None),
    ]  # a warm-up; each case compared, then timed
    assert result["workloads"]["short"]["forced"]["n_tokens"] == 40


@pytest.mark.parametrize("fails", ["attach", "propose"])
def test_a_drafter_that_fails_is_a_failure(kinetic: Any, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    from kinetic_core.engine import model as models

    def broken(*_arguments: Any) -> Any:
        raise RuntimeError("a fault of the drafter")

    found = models.drafter_classes

    def drafter_classes(registry: Any, program: Any) -> dict[str, Any]:
        classes = found(registry, program)
        if fails == "attach":
            return {name: type("Broken", (drafter,), {fails: broken}) for name, drafter in classes.items()}
        return classes | {"context": type("Broken", (classes["context"],), {fails: broken})}

    monkeypatch.setattr(models, "drafter_classes", drafter_classes)
    monkeypatch.setattr("kinetic_core.bench.measure_first_token", lambda _arguments, _runs: 1.0)
    monkeypatch.setattr("kinetic_core.engine.drafting.StepCosts.seconds", lambda _self, _n_rows: 1.0)
    words = ("--backend", "reference", "--prompt", "4", "--predict", "2", "--runs", "1", "--answer", "8")
    ended = kinetic("bench", "tiny-hybrid", *words)
    assert ended.status == 1
    line = "drafters that failed and were turned off (the log tells why): "
    identical = "drafted output identical to plain decoding: "
    if fails == "attach":
        assert f"{line}context, requests\n" in ended.out and identical not in ended.out
    else:
        assert f"{line}context\n{identical}yes, with the drafters that failed turned off\n" in ended.out
    ended = kinetic("bench", "tiny-hybrid", *words, "--json")
    assert ended.status == 1
    assert json.loads(ended.out)["drafter_failed"] == (["context", "requests"] if fails == "attach" else ["context"])


def test_answers_without_a_second_token_have_no_speed(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kinetic_core.engine.sampler import Sampler

    honest = Sampler.choose

    def ends(self: Sampler, *others: Any) -> Any:
        return attrs.evolve(honest(self, *others), token_id=end_id)

    with kinetic_core.load("tiny-hybrid", backend="reference") as model:
        end_id = min(model.tokenizer.end_ids)
    monkeypatch.setattr(Sampler, "choose", ends)
    monkeypatch.setattr("kinetic_core.bench.measure_first_token", lambda _arguments, _runs: 1.0)
    words = ("--backend", "reference", "--prompt", "4", "--predict", "2", "--runs", "1", "--answer", "4")
    ended = kinetic("bench", "tiny-hybrid", *words)
    assert ended.status == 0
    line = f"{'fill JSON, temperature 0:':<24} an answer of 0 tokens: no time between two\n"
    assert line in ended.out and "inf" not in ended.out and "-" not in ended.out.replace("tiny-hybrid", "")
    assert "fill JSON, forced:" in ended.out and "temperature 0.8: an answer of 0 tokens" in ended.out
    result = json.loads(kinetic("bench", "tiny-hybrid", *words, "--json").out)
    figures = result["workloads"]["fill JSON"]["temperature 0"]
    for key in ("plain_tok_s", "drafted_tok_s", "speedup", "tokens_per_step"):
        assert figures[key] is None
        assert result["workloads"]["fill JSON"]["forced"][key] > 0
    assert figures["n_tokens"] == 0


def test_figures_are_of_the_pairs_with_a_second_token() -> None:
    whole = Pair(2.0, 1.0, True, 5, 3, 4, 2, (1, 2, 3, 4, 5))
    ended = Pair(0.0, 0.0, True, 1, 1, 0, 0, (1,))
    figures = describe_pairs([whole, ended])
    assert (figures["plain_tok_s"], figures["drafted_tok_s"], figures["speedup"]) == (2.0, 4.0, 2.0)
    assert figures["tokens_per_step"] == 2.0 and figures["n_tokens"] == 5
    assert describe_pairs([ended])["speedup"] is None
    assert describe_pairs([attrs.evolve(whole, plain_s=0.0)])["drafted_tok_s"] is None


def test_workloads_that_do_not_fit_are_skipped(kinetic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Workload("long", "ab " * 30, "ab")
    with kinetic_core.load("tiny-hybrid", backend="reference") as model:
        n_long, n_short = len(long.prompt_ids(model)), len(only()[0].prompt_ids(model))
    with kinetic_core.load("tiny-hybrid", backend="reference", ctx=n_long + 1) as model:
        result = measure_drafting(model, 400, quiet, [long, *only()], [0.0])
        assert result["workloads_skipped"] == ["long"] and list(result["workloads"]) == ["short"]
        assert result["drafted_identical"] is True
    with kinetic_core.load("tiny-hybrid", backend="reference", ctx=n_short + 2) as model:
        result = measure_drafting(model, 400, quiet, [long, *only()], [0.0])
        assert result["workloads"]["short"]["forced"]["n_tokens"] == 2
    with kinetic_core.load("tiny-hybrid", backend="reference", ctx=n_short + 1) as model:
        result = measure_drafting(model, 400, quiet, [long, *only()], [0.0])
    assert result == {"workloads": {}, "workloads_skipped": ["long", "short"]}
    monkeypatch.setattr("kinetic_core.bench.measure_drafting", lambda *_arguments: result)
    monkeypatch.setattr("kinetic_core.bench.measure_first_token", lambda _arguments, _runs: 1.0)
    words = ("--backend", "reference", "--prompt", "4", "--predict", "2", "--runs", "1")
    ended = kinetic("bench", "tiny-hybrid", *words)
    assert ended.status == 0 and "identical" not in ended.out
    assert f"{'long:':<24} skipped: its prompt leaves no room for an answer in the model's context\n" in ended.out


def test_a_model_without_chat_template_gets_the_bare_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_arguments: Any) -> Any:
        raise TemplateError("the model has no chat template")

    monkeypatch.setattr("kinetic_core.text.ChatTemplate.from_metadata", none)
    with kinetic_core.load(DATA / "llama-f32.gguf", backend="reference") as model:
        assert only()[0].prompt_ids(model) == model.tokenize("ab ab\n\n")


def test_workloads() -> None:
    assert [workload.name for workload in WORKLOADS] == ["rewrite code", "quote passage", "fill JSON"]
    code = WORKLOADS[0]
    assert "goods" in code.instruction and "goods" not in code.answer and "self.items" in code.answer
    assert WORKLOADS[1].answer in WORKLOADS[1].instruction
    records = WORKLOADS[2].answer
    assert records.count('"name"') == 10 and '"Jan de Vries"' in records


def test_loops_are_what_is_said_a_third_time() -> None:
    assert share_in_loops([]) == share_in_loops([1, 2, 3]) == share_in_loops(range(100)) == 0.0
    assert share_in_loops([1, 2, 3, 1, 2, 3]) == 0.0  # said twice
    assert share_in_loops([1, 2, 3] * 3) == pytest.approx(3 / 9)
    assert share_in_loops([7] * 10) == pytest.approx(8 / 10)
    assert share_in_loops([*range(80)] * 3) == 0.0  # longer than the longest period


def test_the_peer_needs_its_package_and_a_file(kinetic: Any) -> None:
    words = ("--backend", "reference", "--prompt", "4", "--predict", "2", "--runs", "1", "--peer")
    ended = kinetic("bench", "tiny-hybrid", *words)
    line = "error: tiny-hybrid lives in memory: there is no file that llama.cpp could read\n"
    assert (ended.status, ended.out, ended.err) == (4, "", line)


@pytest.mark.parametrize(("file", "tied"), [("llama-f32.gguf", True), ("llama3rope-f32.gguf", False)])
def test_bytes_of_a_dense_model(file: str, tied: bool) -> None:
    with kinetic_core.load(DATA / file, backend="reference") as model:
        program, source = model.program, model.source
        table = source.tensors["token_embd.weight"]
        assert tied == ("output.weight" not in source.tensors)
        weights = sum(tensor.n_bytes for tensor in source.tensors.values())
        if not tied:  # one row of the table is looked up
            weights -= table.n_bytes - 4 * table.shape[1]
        kv_bytes = program.kv_bytes_per_position("f16")
        assert bytes_per_token(program, source, "f16", 0) == weights
        assert bytes_per_token(program, source, "f16", 100) == weights + 100 * kv_bytes
        assert bytes_per_token(program, source, "f32", 100) == weights + 200 * kv_bytes


def test_states_count_twice_and_windows_bound_what_is_read(tiny: Model) -> None:
    program, source = tiny.program, tiny.source
    windows = {layer.window for layer in program.kv_layers}
    assert None in windows and len(windows) == 2
    window = max(window for window in windows if window is not None)

    def per_position(only_full: bool) -> int:
        layers = [layer for layer in program.kv_layers if layer.window is None or not only_full]
        return sum(2 * layer.kv_heads * layer.head_dim * 2 for layer in layers)

    base = bytes_per_token(program, source, "f16", 0)
    table = source.tensors["token_embd.weight"]
    weights = sum(tensor.n_bytes for tensor in source.tensors.values()) - table.n_bytes + 4 * table.shape[1]
    assert base == weights + 2 * program.state_bytes and program.state_bytes > 0
    assert bytes_per_token(program, source, "f16", window) - base == window * per_position(False)
    grown = bytes_per_token(program, source, "f16", window + 10) - bytes_per_token(program, source, "f16", window)
    assert grown == 10 * per_position(True)


def test_the_state_of_mamba_is_read_and_written() -> None:
    source = random_model("tiny-hybrid", next(v for v in TinyHybrid.tiny() if v.name == "mamba"), seed=0)
    program = record_program(TinyHybrid(source), FullHead(), source)
    scan, conv = 4 * 16 * 32, 3 * (4 * 32 + 2 * 2 * 16)
    table = source.tensors["token_embd.weight"]
    weights = sum(tensor.n_bytes for tensor in source.tensors.values()) - table.n_bytes + 4 * table.shape[1]
    assert bytes_per_token(program, source, "f16", 0) == weights + 2 * 2 * 4 * (scan + conv)


def test_measuring_leaves_nothing_behind(tiny: Model) -> None:
    before = tiny.engine.statistics()
    rows = rows_seconds(tiny, 20, lambda _what, _share: None)
    assert list(rows) == [1, 2, 4, 8, 16] and all(seconds > 0 for seconds in rows.values())
    result = measure(tiny, BenchOptions(n_prompt=8, n_predict=3, runs=1))
    assert result["rows_cost"]["1"] == 1.0
    streams = measure_streams(tiny, 3, BenchOptions(n_predict=3, runs=1))
    assert streams["ratio"] == pytest.approx(streams["all_tok_s"] / streams["one_tok_s"])
    after = tiny.engine.statistics()
    for key in ("blocks_used", "slots_used", "open_requests"):
        assert after[key] == before[key] == 0


def test_bandwidth_is_that_of_the_bytes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from kinetic_core.bench import bandwidth

    with bandwidth.BandwidthMeter(2, 2**20) as meter:
        assert meter.gb_s() > 0.1
        clock = iter([0.0, 0.5, 1.0, 1.25])
        monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(clock))
        assert meter.gb_s(passes=2) == pytest.approx(2**20 / 0.25 / 1e9)


def test_prompts_differ_by_run_and_fit_the_vocabulary() -> None:
    assert bench_tokens(5, 0, 50000) == [1, 8, 15, 22, 29]
    assert bench_tokens(5, 1, 50000) != bench_tokens(5, 2, 50000)
    assert set(bench_tokens(1000, 3, 10)) <= set(range(1, 10))


def test_the_profile_is_of_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETIC_PROFILE", raising=False)
    loads: list[str | None] = []

    class Executable:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def statistics(self) -> dict[str, Any]:
            return {"profile": {"linear": 0.75, "attention": 0.25}}

    class Profiled(Model):
        executable = property(lambda self: Executable(self._executable))  # type: ignore[assignment]

    def load() -> Model:
        loads.append(os.environ.get("KINETIC_PROFILE"))
        model = kinetic_core.load("tiny-hybrid", backend="reference")
        model.__class__ = Profiled
        return model

    shares = measure_profile(load, BenchOptions(n_prompt=8, n_predict=3))
    assert shares == {name: {"linear": 0.75, "attention": 0.25} for name in ("decode", "prompt")}
    assert loads == ["1", "1"] and "KINETIC_PROFILE" not in os.environ
    plain = measure_profile(lambda: kinetic_core.load("tiny-hybrid", backend="reference"), BenchOptions(8, 3))
    assert plain == {}


def test_a_failing_start_is_an_error() -> None:
    with pytest.raises(BackendError, match="does not exist"):
        measure_first_token(["--model", "no-such.gguf", "--backend", "reference"], 1)


FAKE = """
class _Any:
    def __init__(self):
        self.path = None
    def __getattr__(self, name):
        value = _Any()
        setattr(self, name, value)
        return value
CommonParams = _Any
class Server:
    def __init__(self, params):
        print("noise on the standard output", flush=True)
        assert params.n_ctx == 8 + 4 + 64 and params.cpuparams.n_threads == 3 and not params.cache_prompt
        self.path = params.model.path
    def handle_completions(self, request):
        print("more noise", flush=True)
        if self.path.endswith("broken"):
            raise SystemExit(5)
        assert request["ignore_eos"] and request["n_predict"] == 4 and len(request["prompt"]) == 8
        return {"timings": {"prompt_per_second": float(request["prompt"][0]), "predicted_per_second": 7.0}}
"""


def test_the_peer_answers_run_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the bindings: the protocol, the parameters, and noise on the standard output."""
    (tmp_path / "xllamacpp.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"n_threads": 3, "n_prompt": 8, "n_predict": 4, "vocab_size": 500}
    with Peer(Path("a.gguf"), **settings) as peer:
        assert peer.run(0) == {"prompt_tok_s": 1.0, "decode_tok_s": 7.0}
        assert peer.run(2) == {"prompt_tok_s": 27.0, "decode_tok_s": 7.0}
    with Peer(Path("broken"), **settings) as peer, pytest.raises(BackendError, match=r"llama\.cpp ended.*5"):
        peer.run(0)


def test_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["kinetic_core.bench.peer"].importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BackendError, match="pip install xllamacpp"):
        Peer(Path("x"), n_threads=1, n_prompt=1, n_predict=1, vocab_size=9)


def test_the_ratio_is_ours_over_theirs(tiny: Model) -> None:
    class Constant:
        def run(self, run: int) -> dict[str, float]:
            return {"prompt_tok_s": 10.0, "decode_tok_s": 5.0}

    result = measure(tiny, BenchOptions(n_prompt=8, n_predict=3, runs=1), peer=Constant())  # type: ignore[arg-type]
    peer = result["peer"]
    assert peer["prompt_tok_s"] == 10.0 and peer["decode_tok_s"] == 5.0
    assert peer["prompt_ratio"] == pytest.approx(result["prompt_tok_s"] / 10.0)
    assert peer["decode_ratio"] == pytest.approx(result["decode_tok_s"] / 5.0)
