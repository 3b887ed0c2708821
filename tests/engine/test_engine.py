"""What one request gets: text, ends, log-probabilities, choices, seeds."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from conftest import MakeEngine

from kinetic_core.engine.request import Chunk, Completion, GenerationRequest, SamplingOptions
from kinetic_core.engine.sampler import log_softmax
from kinetic_core.errors import Cancelled, ContextLengthError, RequestError

GREEDY = SamplingOptions(temperature=0.0)
ALPHABET = "abcdefghijklmnopqrstuvwxyz."


def ask(text: str, sampling: SamplingOptions = GREEDY, **options: Any) -> GenerationRequest:
    return GenerationRequest(tuple(text.encode()), sampling, **options)


def one(completions: list[Completion]) -> Completion:
    assert len(completions) == 1
    return completions[0]


def test_a_greedy_answer_ends_at_the_end_token(make_engine: MakeEngine) -> None:
    completion = one(make_engine().submit(ask("hello\n")).result())
    assert completion.text == ALPHABET
    assert completion.token_ids == tuple(ALPHABET.encode())
    assert completion.finish_reason == "stop"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (6, 27)
    assert completion.timings.predict_s > 0


def test_chunks_join_to_the_answer_and_the_last_one_says_why(make_engine: MakeEngine) -> None:
    chunks = list(make_engine().submit(ask("hello\n", max_tokens=5)))
    assert [chunk.text for chunk in chunks] == ["a", "b", "c", "d", "e"]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    last = chunks[-1]
    assert last.usage is not None and last.timings is not None and last.seed is not None


def test_ignore_end_carries_on(make_engine: MakeEngine) -> None:
    completion = one(make_engine().submit(ask("hello\n", max_tokens=40, ignore_end=True)).result())
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 40
    assert completion.text.startswith(ALPHABET + "<|im_end|>\nabc")


def test_s2_max_tokens_zero_runs_the_prompt_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for completion in engine.submit(ask("hello\n", max_tokens=0, n=2)).result():
        assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), "length")
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (6, 0)
    assert engine.statistics()["prompt_rows"] == 6


@pytest.mark.parametrize(("stop", "text"), [(("mno",), "abcdefghijkl"), (("xyz.", "mnX"), "abcdefghijklmnopqrstuvw")])
def test_s3_stop_strings_over_several_tokens(make_engine: MakeEngine, stop: tuple[str, ...], text: str) -> None:
    completion = one(make_engine().submit(ask("hello\n", stop=stop)).result())
    assert (completion.text, completion.finish_reason) == (text, "stop")
    assert completion.token_ids == tuple(text.encode())


def test_s3_held_text_is_flushed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    completion = one(engine.submit(ask("hello\n", stop=("defX",), max_tokens=6)).result())
    assert (completion.text, completion.finish_reason) == ("abcdef", "length")
    completion = one(engine.submit(ask("hello\n", stop=("z.!",))).result())
    assert (completion.text, completion.finish_reason) == (ALPHABET, "stop")


def test_a_stop_that_completes_with_the_last_token_counts(make_engine: MakeEngine) -> None:
    completion = one(make_engine().submit(ask("hello\n", stop=("def",), max_tokens=6)).result())
    assert (completion.text, completion.finish_reason) == ("abc", "stop")


def test_a_stop_found_only_at_the_end_counts(make_engine: MakeEngine) -> None:
    # "bc" is complete, but until the end the "abc" before it could still become the earlier "abcX".
    completion = one(make_engine().submit(ask("hello\n", stop=("abcX", "bc"), max_tokens=3)).result())
    assert (completion.text, completion.finish_reason, completion.token_ids) == ("a", "stop", (97,))


@pytest.mark.parametrize("prompt", ["hello\n", "xyz."])
def test_s10_the_first_token_is_the_stop(make_engine: MakeEngine, prompt: str) -> None:
    request = ask(prompt, SamplingOptions(temperature=0.0, logprobs=3), stop=("a",))
    completion = one(make_engine().submit(request).result())
    assert (completion.text, completion.token_ids, completion.logprobs) == ("", (), ())
    assert completion.finish_reason == "stop"


def test_an_answer_that_fills_the_context_ends_with_length(make_engine: MakeEngine) -> None:
    engine = make_engine(context_length=20)
    completion = one(engine.submit(ask("hello\n")).result())
    assert (completion.text, completion.finish_reason) == (ALPHABET[:14], "length")
    full = one(engine.submit(GenerationRequest(tuple(b"x" * 18 + b"\n"), GREEDY)).result())
    assert (full.text, full.finish_reason) == ("a", "length")


def test_s5_a_prompt_longer_than_the_context_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(context_length=20)
    with pytest.raises(ContextLengthError, match=r"21.*20"):
        engine.submit(GenerationRequest((1,) * 21, GREEDY))
    assert engine.statistics()["open_requests"] == 0


def test_s1_bad_options_never_reach_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="temperature"):
        engine.submit(ask("hi", SamplingOptions(temperature=float("nan"))))
    assert engine.statistics()["requests"] == 0


def test_logprobs_are_those_of_the_plain_distribution(make_engine: MakeEngine) -> None:
    engine = make_engine(random=True)
    sampling = SamplingOptions(temperature=1.5, top_k=5, seed=3, logprobs=4, repeat_penalty=1.3, logit_bias={65: 3.0})
    prompt = tuple(range(40, 60))
    completion = one(engine.submit(GenerationRequest(prompt, sampling, max_tokens=12, ignore_end=True)).result())
    rows = engine.logits(prompt + completion.token_ids)
    assert len(completion.logprobs) == 12
    for index, entry in enumerate(completion.logprobs):
        expected = log_softmax(rows[len(prompt) - 1 + index])
        assert entry.token_id == completion.token_ids[index]
        assert entry.logprob == expected[entry.token_id]
        assert [token for token, _, _ in entry.top] == np.lexsort((np.arange(300), -expected))[:4].tolist()
        assert [logprob for _, _, logprob in entry.top] == sorted(expected, reverse=True)[:4]
        assert entry.token_bytes == engine.tokenizer.token_bytes(entry.token_id)


def test_logprobs_zero_gives_the_chosen_token_only(make_engine: MakeEngine) -> None:
    completion = one(make_engine().submit(ask("hello\n", SamplingOptions(temperature=0, logprobs=0))).result())
    assert [entry.top for entry in completion.logprobs] == [()] * 27


def test_echo_gives_the_prompts_logprobs(make_engine: MakeEngine) -> None:
    engine = make_engine(random=True, max_outputs=8)
    prompt = tuple(np.random.default_rng(0).integers(0, 256, 50).tolist())
    sampling = SamplingOptions(temperature=0.0, logprobs=2)
    for max_tokens, n in ((0, 1), (3, 2)):
        generation = engine.submit(GenerationRequest(prompt, sampling, max_tokens, n=n, echo_logprobs=True))
        chunks = [chunk for chunk in generation if chunk.prompt_logprobs is not None]
        assert len(chunks) == 1 and chunks[0].index == 0
        got = chunks[0].prompt_logprobs
        assert got is not None and got[0] is None and len(got) == 50
        rows = engine.logits(prompt)
        for position, entry in enumerate(got[1:]):
            assert entry is not None
            assert (entry.token_id, len(entry.top)) == (prompt[position + 1], 2)
            assert entry.logprob == log_softmax(rows[position])[prompt[position + 1]]


def test_echo_of_one_token(make_engine: MakeEngine) -> None:
    completion = one(make_engine().submit(ask("\n", max_tokens=2, echo_logprobs=True)).result())
    assert (completion.prompt_logprobs, completion.text) == ((None,), "ab")


def test_logits_of_every_row(make_engine: MakeEngine) -> None:
    engine = make_engine(context_length=300)
    ids = tuple(np.random.default_rng(1).integers(0, 300, 300).tolist())
    whole = engine.logits(ids)
    assert whole.shape == (300, 300)
    assert np.array_equal(engine.logits(ids[:77]), whole[:77])
    with pytest.raises(RequestError):
        engine.logits((300,))


def test_choices_share_the_prompt_and_differ_by_their_index(make_engine: MakeEngine) -> None:
    engine = make_engine(random=True)
    prompt = tuple(np.random.default_rng(2).integers(0, 256, 300).tolist())
    sampling = SamplingOptions(temperature=1.2, seed=11, logprobs=1)
    request = GenerationRequest(prompt, sampling, 10, n=5, ignore_end=True)
    five = engine.submit(request).result()
    rows = engine.statistics()["prompt_rows"]
    assert rows == 300
    assert [completion.index for completion in five] == [0, 1, 2, 3, 4]
    assert len({completion.token_ids for completion in five}) == 5
    two = engine.submit(GenerationRequest(prompt, sampling, 10, n=2, ignore_end=True)).result()
    assert [(c.token_ids, c.logprobs) for c in two] == [(c.token_ids, c.logprobs) for c in five[:2]]
    greedy = engine.submit(GenerationRequest(prompt, GREEDY, 10, n=3, ignore_end=True)).result()
    assert len({completion.token_ids for completion in greedy}) == 1


def test_more_choices_than_places(make_engine: MakeEngine) -> None:
    request = ask("hello\n", SamplingOptions(temperature=1.0, seed=4, top_k=0), n=6, max_tokens=8, ignore_end=True)
    wide = make_engine(random=True).submit(request).result()
    narrow = make_engine(random=True, max_sequences=2, n_slots=2).submit(request).result()
    assert [c.token_ids for c in narrow] == [c.token_ids for c in wide]


def test_seeds(make_engine: MakeEngine) -> None:
    engine = make_engine(random=True)

    def run(seed: int | None) -> Completion:
        return one(engine.submit(ask("hello", SamplingOptions(seed=seed, top_k=0), max_tokens=12)).result())

    first = run(7)
    assert first.seed == 7
    assert run(7).token_ids == first.token_ids
    assert run(8).token_ids != first.token_ids
    drawn = run(None)
    assert drawn.seed != run(None).seed
    assert run(drawn.seed).token_ids == drawn.token_ids
    assert run(2**64 - 1).seed == 2**64 - 1


def test_penalties_change_the_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(random=True)
    plain = one(engine.submit(ask("hello", max_tokens=40, ignore_end=True)).result()).token_ids
    for options in (
        {"repeat_penalty": 1.8},
        {"presence_penalty": 3.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {plain[0]: -50.0}},
        {"logit_bias": {5: 50.0}},
    ):
        sampling = SamplingOptions(temperature=0.0, **options)  # type: ignore[arg-type]
        assert one(engine.submit(ask("hello", sampling, max_tokens=40, ignore_end=True)).result()).token_ids != plain


def test_async_readers(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def read(max_tokens: int) -> str:
        chunks: list[Chunk] = [chunk async for chunk in engine.submit(ask("hello\n", max_tokens=max_tokens))]
        return "".join(chunk.text for chunk in chunks)

    async def leave() -> None:
        generation = engine.submit(ask("hello\n", max_tokens=1500, ignore_end=True))
        with generation:
            async for chunk in generation:
                if chunk.text == "c":
                    break
        reasons = [chunk.finish_reason async for chunk in generation]
        assert reasons[-1] == "cancelled"

    async def everything() -> list[Any]:
        results = await asyncio.gather(read(3), read(10), read(27), leave())
        whole = await engine.submit(ask("hello\n")).result_async()
        return [*results, whole[0].text]

    assert asyncio.run(everything()) == ["abc", "abcdefghij", ALPHABET, None, ALPHABET]


def test_a_reader_whose_loop_is_gone_is_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def abandon() -> None:
        generation = engine.submit(ask("hello\n", max_tokens=1500, ignore_end=True))
        task = asyncio.ensure_future(anext(aiter(generation)))
        await asyncio.sleep(0)
        del task
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    task = loop.create_task(abandon())
    with pytest.raises(RuntimeError):
        loop.run_until_complete(task)
    for pending in asyncio.all_tasks(loop):
        pending._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    deadline = time.monotonic() + 10
    while engine.statistics()["open_requests"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.statistics()["cancelled"] == 1


def test_closing_ends_what_runs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.failure is None
    generation = engine.submit(ask("hello\n", max_tokens=2000, ignore_end=True))
    next(generation)
    engine.close()
    engine.close()
    assert list(generation)[-1].finish_reason == "cancelled"
    assert isinstance(engine.failure, Cancelled)
    with pytest.raises(Cancelled):
        engine.submit(ask("hello"))


def test_an_idle_engine_uses_no_processor(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit(ask("hello\n")).result()
    others = threading.active_count()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1, others
