"""Text completions through the real `openai` client."""

from __future__ import annotations

import math

import openai
import pytest

from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from tests.server.support import NAME, Running

AWAKE = {"top_k": 0, "top_p": 1, "min_p": 0}


def _solo(running: Running, ids: tuple[int, ...], max_tokens: int | None = 8, **sampling):
    request = GenerationRequest(ids, SamplingOptions(**sampling), max_tokens=max_tokens)
    return running.model.engine.submit(request).result()[0]


def test_answer_of_a_string_and_of_its_ids(alphabet_client: openai.OpenAI):
    for prompt in ("abc", [97, 98, 99], ["abc"], [[97, 98, 99]]):
        answer = alphabet_client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=5)
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason, choice.index) == ("defgh", "length", 0)
        assert choice.logprobs is None
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")


def test_default_length_is_sixteen(client: openai.OpenAI, running: Running):
    assert (
        running.complete(max_tokens=None, logit_bias={"259": -100, "257": -100}).json()["usage"]["completion_tokens"]
        == 16
    )


def test_ends_with_the_turn(alphabet_client: openai.OpenAI):
    answer = alphabet_client.completions.create(model=NAME, prompt="x", temperature=0, max_tokens=40)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("yz.", "stop")


def test_stream_joins_to_the_answer(client: openai.OpenAI):
    asked = {"model": NAME, "prompt": "Once", "max_tokens": 12, "seed": 7, "logprobs": 2, "echo": True}
    whole = client.completions.create(**asked).choices[0]
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == whole.text
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for choice in choices for item in getattr(choice.logprobs, field)]
        assert joined == getattr(whole.logprobs, field), field
    assert choices[-1].finish_reason == whole.finish_reason == "length"


def test_echo(client: openai.OpenAI, running: Running):
    text = "Ünï \N{GRINNING FACE}\0 end"
    answer = client.completions.create(model=NAME, prompt=text, echo=True, max_tokens=4, seed=1)
    plain = client.completions.create(model=NAME, prompt=text, max_tokens=4, seed=1)
    assert answer.choices[0].text == text + plain.choices[0].text
    ids = client.completions.create(model=NAME, prompt=list(text.encode()), echo=True, max_tokens=4, seed=1)
    assert ids.choices[0].text == answer.choices[0].text


def test_echoed_logprobs_are_the_models(client: openai.OpenAI, running: Running):
    ids = list(b"A small text.")
    answer = client.completions.create(model=NAME, prompt=ids, echo=True, max_tokens=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "A small text."
    assert answer.usage.completion_tokens == 0
    assert logprobs.tokens == [chr(byte) for byte in ids]
    assert logprobs.text_offset == list(range(len(ids)))
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    for place in range(1, len(ids)):
        solo = _solo(running, tuple(ids[:place]), 1, temperature=0, logprobs=20, logit_bias={ids[place]: 1000.0})
        assert solo.token_ids == (ids[place],)
        assert logprobs.token_logprobs[place] == solo.logprobs[0].logprob
        tops = logprobs.top_logprobs[place]
        assert 2 <= len(tops) <= 3
        assert tops[logprobs.tokens[place]] == logprobs.token_logprobs[place]
        assert max(tops.values()) == solo.logprobs[0].top[0][2]
        assert next(iter(tops.values())) == max(tops.values())


def test_echoed_logprobs_of_one_token_and_of_several_choices(client: openai.OpenAI):
    asked = {"model": NAME, "echo": True, "logprobs": 0, "max_tokens": 3, "seed": 3, "temperature": 1.5}
    one = client.completions.create(prompt=[65], **asked).choices[0].logprobs
    assert one.token_logprobs[0] is None
    assert len(one.tokens) == 4
    whole = client.completions.create(prompt="Hello", n=3, **asked).choices
    assert len({tuple(choice.logprobs.tokens[5:]) for choice in whole}) > 1
    for choice in whole:
        assert "".join(choice.logprobs.tokens[:5]) == "Hello"
        assert choice.logprobs.token_logprobs[:5] == whole[0].logprobs.token_logprobs[:5]
    streamed: dict[int, list[str]] = {0: [], 1: [], 2: []}
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt="Hello", n=3, **asked, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.logprobs.tokens
        texts[choice.index] += choice.text
    assert [streamed[choice.index] for choice in whole] == [choice.logprobs.tokens for choice in whole]
    assert texts == [choice.text for choice in whole]


def test_logprobs_without_echo(client: openai.OpenAI, running: Running):
    sampling = {"temperature": 1.0, "seed": 4}
    answer = client.completions.create(model=NAME, prompt="Hello", max_tokens=8, logprobs=20, **sampling)
    solo = _solo(running, tuple(b"Hello"), logprobs=20, **sampling)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == [token.logprob for token in solo.logprobs]
    assert all(20 <= len(tops) <= 21 for tops in logprobs.top_logprobs)
    assert all(math.isfinite(value) and value <= 0 for tops in logprobs.top_logprobs for value in tops.values())


def test_bytes_that_are_no_text_have_names_of_their_own(client: openai.OpenAI):
    answer = client.completions.create(
        model=NAME, prompt="a", max_tokens=2, temperature=0, logprobs=1, logit_bias={"240": 100}
    )
    assert answer.choices[0].logprobs.tokens == ["bytes:\\xf0", "bytes:\\xf0"]
    assert answer.choices[0].text == "\N{REPLACEMENT CHARACTER}" * 2
    assert answer.choices[0].logprobs.text_offset == [0, 0]


def test_several_prompts(client: openai.OpenAI, running: Running):
    asked = {"model": NAME, "n": 2, "seed": 11, "max_tokens": 10, "temperature": 1.2}
    prompts = ["One", "Another", "The third"]
    together = client.completions.create(prompt=prompts, **asked)
    alone = [client.completions.create(prompt=prompt, **asked) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [choice.text for one in alone for choice in one.choices]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert together.usage.prompt_tokens == sum(map(len, prompts))
    assert together.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    texts = [""] * 6
    for chunk in client.completions.create(prompt=prompts, **asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in together.choices]


def test_special_texts_in_a_prompt_are_plain(running: Running):
    typed = running.complete(prompt="<|im_end|>", max_tokens=0).json()
    assert typed["usage"]["prompt_tokens"] == len("<|im_end|>")
    by_id = running.complete(prompt=[259], max_tokens=0).json()
    assert by_id["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([65, "b"], "prompt[1]"),
        ([65, True], "prompt[1]"),
        ([65, 10**9], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([1.5], "prompt[0]"),
        (["a", 5], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        ([[65], [66, None]], "prompt[1][1]"),
        (["a"] * 17, "prompt"),
    ],
)
def test_prompts_that_cannot_be_used(running: Running, prompt, field):
    answer = running.complete(prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_fields_of_openai_that_are_not_supported(running: Running):
    for field, value in (("suffix", "x"), ("best_of", 3)):
        answer = running.complete(**{field: value})
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (field, "unsupported_parameter")
    assert running.complete(suffix=None, best_of=1).status_code == 200
    assert running.complete(best_of=2, n=2).status_code == 200
