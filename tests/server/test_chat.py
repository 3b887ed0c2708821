"""Chat completions through the real `openai` client."""

from __future__ import annotations

import openai
import pytest

from kinetic_core.engine.request import GenerationRequest, SamplingOptions
from tests.server.support import NAME, Running

ALPHABET = "abcdefghijklmnopqrstuvwxyz."
USER = [{"role": "user", "content": "Say the alphabet."}]


def test_answer(alphabet_client: openai.OpenAI, predictable: Running):
    answer = alphabet_client.chat.completions.create(model=NAME, messages=USER, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ALPHABET, "stop")
    assert choice.logprobs is None
    prompt = predictable.model.template.encode(predictable.model.tokenizer, USER)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(ALPHABET))
    assert usage.total_tokens == len(prompt) + len(ALPHABET)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == NAME
    assert answer.system_fingerprint == "kinetic-" + predictable.model.kernel_digest[:12]


def test_stream_joins_to_the_answer(alphabet_client: openai.OpenAI):
    stream = alphabet_client.chat.completions.create(model=NAME, messages=USER, temperature=0, stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ALPHABET
    assert len(chunks) == len(ALPHABET) + 2  # the role, a chunk per token, the end
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


def test_stream_with_usage(alphabet_client: openai.OpenAI, predictable: Running):
    asked = {"model": NAME, "messages": USER, "temperature": 0}
    whole = alphabet_client.chat.completions.create(**asked)
    chunks = list(alphabet_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])


def test_length_and_both_names_of_max_tokens(alphabet_client: openai.OpenAI):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = alphabet_client.chat.completions.create(model=NAME, messages=USER, temperature=0, **{name: 3})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")
        assert answer.usage.completion_tokens == 3


def test_stop(alphabet_client: openai.OpenAI):
    for stop in ("de", ["xyz", "de"], ["def", "de", "q"]):
        answer = alphabet_client.chat.completions.create(model=NAME, messages=USER, temperature=0, stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "stop")


def test_n_choices_are_those_of_the_engine(client: openai.OpenAI, running: Running):
    answer = client.chat.completions.create(model=NAME, messages=USER, n=3, seed=5, max_tokens=12, temperature=1.5)
    prompt = tuple(running.model.template.encode(running.model.tokenizer, USER))
    sampling = SamplingOptions(temperature=1.5, seed=5)
    expected = running.model.engine.submit(GenerationRequest(prompt, sampling, max_tokens=12, n=3)).result()
    assert [choice.message.content for choice in answer.choices] == [completion.text for completion in expected]
    assert len({completion.text for completion in expected}) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(completion.usage.completion_tokens for completion in expected)


def test_n_streamed_equals_n_whole(client: openai.OpenAI):
    asked = {"model": NAME, "messages": USER, "n": 3, "seed": 9, "max_tokens": 12, "temperature": 1.5}
    whole = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    ends = [None, None, None]
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_logprobs(client: openai.OpenAI, running: Running):
    asked = {"model": NAME, "messages": USER, "seed": 1, "max_tokens": 8, "temperature": 1}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    prompt = tuple(running.model.template.encode(running.model.tokenizer, USER))
    sampling = SamplingOptions(temperature=1, seed=1, logprobs=3)
    expected = running.model.engine.submit(GenerationRequest(prompt, sampling, max_tokens=8)).result()[0]
    content = answer.choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in content] == [token.token_bytes for token in expected.logprobs]
    assert [entry.logprob for entry in content] == [token.logprob for token in expected.logprobs]
    assert [[(bytes(top.bytes), top.logprob) for top in entry.top_logprobs] for entry in content] == [
        [(token_bytes, logprob) for _, token_bytes, logprob in token.top] for token in expected.logprobs
    ]
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    plain = client.chat.completions.create(**asked, logprobs=True)
    assert [entry.logprob for entry in plain.choices[0].logprobs.content] == [entry.logprob for entry in content]
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content)


def test_streamed_logprobs_join_to_the_whole(client: openai.OpenAI):
    asked = {"model": NAME, "messages": USER, "seed": 2, "max_tokens": 8, "temperature": 1, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content
    stream = client.chat.completions.create(**asked, top_logprobs=2, stream=True)
    joined = [entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert joined == whole


def test_x4_half_characters_in_stream_and_logprobs(client: openai.OpenAI):
    # The tiny vocabulary has a token per byte, and a bias forces them one after another.
    grin = "\N{GRINNING FACE}".encode()
    for ids, text in ((grin, "\N{GRINNING FACE}"), (b"\xe5\xa5", "\N{REPLACEMENT CHARACTER}")):
        pieces, got = [], []
        for chunk in _forced(client, ids):
            pieces.append(chunk.choices[0].delta.content or "")
            if chunk.choices[0].logprobs:
                got += [entry.bytes for entry in chunk.choices[0].logprobs.content]
        assert "".join(pieces) == text
        assert [piece for piece in pieces if piece] == [text]
        assert got == [[byte] for byte in ids]


def _forced(client: openai.OpenAI, ids: bytes):
    """A stream whose answer is `ids`: greedy among falling biases; a token once given loses half of its score."""
    bias = {str(token): 100 - 15 * place for place, token in enumerate(ids)}
    asked = {"temperature": 0, "logit_bias": bias, "extra_body": {"repeat_penalty": 2}}
    return client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=len(ids), logprobs=True, stream=True, **asked
    )


def test_same_seed_same_text_and_a_drawn_seed_is_returned(client: openai.OpenAI):
    asked = {"model": NAME, "messages": USER, "max_tokens": 16, "temperature": 1.5}
    first = client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked, seed=first.seed)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.seed == first.seed
    assert 0 <= first.seed < 2**53
    assert client.chat.completions.create(**asked).seed != first.seed
    last = list(client.chat.completions.create(**asked, seed=first.seed, stream=True))[-1]
    assert last.seed == first.seed


def test_biggest_seed(client: openai.OpenAI):
    answer = client.chat.completions.create(model=NAME, messages=USER, max_tokens=2, seed=2**64 - 1)
    assert answer.seed == 2**64 - 1


@pytest.mark.parametrize(
    "content",
    ["Say the alphabet.", [{"type": "text", "text": "Say the "}, {"type": "text", "text": "alphabet."}]],
)
def test_content_parts_are_joined(client: openai.OpenAI, running: Running, content):
    answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": content}], max_tokens=0)
    assert answer.usage.prompt_tokens == len(running.model.template.encode(running.model.tokenizer, USER))


def test_an_answer_can_be_sent_back(client: openai.OpenAI):
    first = client.chat.completions.create(model=NAME, messages=USER, max_tokens=4, seed=1)
    messages = [*USER, first.choices[0].message, {"role": "user", "content": "More."}]
    assert client.chat.completions.create(model=NAME, messages=messages, max_tokens=4).choices


def test_template_variables_reach_the_template(make_server):
    from tests.server.support import tiny_model

    template = "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking %} think!!{% endif %}"
    running = make_server(tiny_model(template=template))
    plain = running.chat(max_tokens=0).json()["usage"]["prompt_tokens"]
    off = running.chat(max_tokens=0, chat_template_kwargs={"enable_thinking": False}).json()
    on = running.chat(max_tokens=0, chat_template_kwargs={"enable_thinking": True}).json()
    assert off["usage"]["prompt_tokens"] == plain == len("hi")
    assert on["usage"]["prompt_tokens"] == plain + len(" think!!")


def test_extensions_reach_the_sampler(running: Running):
    prompt = tuple(running.model.template.encode(running.model.tokenizer, [{"role": "user", "content": "hi"}]))
    fields = {"top_k": 7, "min_p": 0.01, "repeat_penalty": 1.3, "top_p": 0.9, "temperature": 1.4}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.25, "seed": 3}
    sampling = SamplingOptions(**fields, logit_bias={65: 4.0})
    expected = running.model.engine.submit(GenerationRequest(prompt, sampling, max_tokens=24)).result()[0].text
    answer = running.chat(**fields, logit_bias={"65": 4}, max_tokens=24).json()
    assert answer["choices"][0]["message"]["content"] == expected
    for name in fields:
        changed = {"top_k": 1, "min_p": 0.9, "repeat_penalty": 2, "top_p": 0.1, "temperature": 0, "seed": 4}.get(
            name, 2
        )
        body = running.chat(**(fields | {name: changed}), logit_bias={"65": 4}, max_tokens=24).json()
        assert body["choices"][0]["message"]["content"] != expected, name


def test_a_salt_reaches_the_engine(running: Running, monkeypatch: pytest.MonkeyPatch):
    seen = []
    submit = running.model.engine.submit

    def watched(request, **others):
        seen.append(request.salt)
        return submit(request, **others)

    monkeypatch.setattr(running.model.engine, "submit", watched)
    running.chat(max_tokens=1, cache_salt="mine")
    running.chat(max_tokens=1)
    body = {"prompt": "hi", "max_tokens": 1, "cache_salt": "x" * 256}
    assert running.http.post("/v1/completions", json=body).status_code == 200
    assert seen == ["mine", "", "x" * 256]


def test_timings(running: Running):
    timings = running.chat(max_tokens=4).json()["timings"]
    assert set(timings) == {"queue_ms", "prompt_ms", "predict_ms", "drafted", "accepted", "steps"}
    assert timings["steps"] == 4 - timings["accepted"]
    assert timings["prompt_ms"] > 0
    assert timings["predict_ms"] > 0
