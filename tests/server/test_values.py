"""What a body may say: every field's range and type, defaults, unknown fields, damaged JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.server.support import Running

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}


def _post(running: Running, text: str | bytes, route: str = "/v1/chat/completions"):
    return running.http.post(route, content=text, headers={"Content-Type": "application/json"})


def _error(answer) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


BAD = [
    ("temperature", ["NaN", "Infinity", "-Infinity", "1e999", "-1", '"1"', "1e30", "true", "[]", "2.01", "9" * 400]),
    ("top_p", ["0", "1.5", "-0.1", '"1"', "NaN", "false"]),
    ("top_k", ["-1", "1000000000", "1.5", '"5"', "true"]),
    ("min_p", ["2", "-0.1", '"0"', "NaN"]),
    ("repeat_penalty", ["1e9", "0", "-1", '"1"', "Infinity"]),
    ("presence_penalty", ["1e9", "-3", '"1"', "NaN"]),
    ("frequency_penalty", ["1e9", "-3", '"1"', "NaN"]),
    ("seed", ["-1", str(2**70), str(2**64), "1.5", '"1"', "true", "1e300"]),
    ("n", ["0", "1000000", "-1", "17", "1.5", '"1"', "true"]),
    ("max_tokens", ["-1", "1.5", '"5"', "true", str(2**31), "[]"]),
    ("max_completion_tokens", ["-1", "1.5", '"5"', "true"]),
    ("logit_bias", ['{"99999999": 5}', '{"-1": 5}', '{"a": 5}', '{"1_0": 5}', '{"65": 1, "065": 2}', "[]", "5"]),
    ("logit_bias.65", ['{"65": "5"}', '{"65": 1000}', '{"65": NaN}', '{"65": true}', '{"65": null}']),
    ("stop", ["5", "[5]", "[null]", "{}", json.dumps(["x"] * 17), json.dumps("x" * 1001), "true"]),
    ("cache_salt", ["5", "[]", "true", json.dumps("x" * 257)]),
    ("stream", ['"true"', "1", "[]"]),
    ("model", ["5", "[]"]),
    ("stream_options", ["5", "[]", '{"include_usage": true}']),
    ("stream_options.include_usage", ['{"include_usage": 1}']),
    ("stream_options.x", ['{"x": 1}']),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD for value in values])
def test_s1_bad_values_are_refused_by_name(running: Running, field: str, value: str):
    name = field.partition(".")[0]
    for route, good in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        body = {key: item for key, item in good.items() if key != name}
        text = json.dumps(body)[:-1] + f', "{name}": {value}}}'
        answer = _post(running, text, route)
        assert answer.status_code == 400, answer.text
        error = _error(answer)
        assert error["param"] == field
        assert name in error["message"]
        assert error["type"] == "invalid_request_error"


def test_limits_themselves_are_allowed(running: Running):
    good = {
        "temperature": [0, 2, 1e-300], "top_p": [1, 1e-9], "top_k": [0, 1_000_000, 5.0], "min_p": [0, 1],
        "repeat_penalty": [2, 0.5], "presence_penalty": [-2, 2], "frequency_penalty": [-2, 2], "seed": [0, 2**64 - 1],
        "n": [1, 16], "logit_bias": [{}, {"299": 100, "0": -100}], "stop": ["", [], [""], ["x"] * 16, None],
    }  # fmt: skip
    for field, values in good.items():
        for value in [*values, None]:
            for answer in (running.chat(**{"max_tokens": 2, field: value}), running.complete(**{field: value})):
                assert answer.status_code == 200, (field, value, answer.text)


def test_s2_null_means_the_default(running: Running):
    absent = running.chat(max_tokens=8, seed=1).json()
    null = running.chat(
        max_tokens=8, seed=1, temperature=None, top_p=None, top_k=None, min_p=None, stop=None, model=None, n=None,
        stream=None, logit_bias=None, logprobs=None, stream_options=None, chat_template_kwargs=None, tools=None,
    ).json()  # fmt: skip
    assert null["choices"] == absent["choices"]
    no_end = {"logit_bias": {"257": -100, "259": -100}}
    long = running.chat(max_tokens=None, stop="\n", **no_end, seed=1, temperature=2, top_k=0, top_p=1, min_p=0).json()
    assert long["choices"][0]["finish_reason"] in ("stop", "length")


def test_s2_zero_tokens_run_the_prompt_only(running: Running):
    for stream in (False, True):
        for answer in (running.chat(max_tokens=0, stream=stream), running.complete(max_tokens=0, stream=stream)):
            assert answer.status_code == 200
            if not stream:
                body = answer.json()
                assert body["usage"]["completion_tokens"] == 0
                assert body["usage"]["prompt_tokens"] > 0
                choice = body["choices"][0]
                assert (choice.get("text", "") or choice.get("message", {}).get("content", "")) == ""
                assert choice["finish_reason"] == "length"
            else:
                assert '"finish_reason":"length"' in answer.text


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([None], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": 5, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}], "messages[0].content[0].x"),
        ([{"role": "user", "content": "hi", "colour": 1}], "messages[0].colour"),
        ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": 7}], "messages[1].content"),
    ],
)
def test_s2_messages_that_are_none(running: Running, messages, field):
    answer = running.http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert _error(answer)["param"] == field


def test_s2_null_content_is_the_empty_text(running: Running):
    for role in ("user", "assistant", "system"):
        counts = [
            running.http.post(
                "/v1/chat/completions", json={"messages": [{"role": role, "content": content}], "max_tokens": 0}
            ).json()["usage"]["prompt_tokens"]
            for content in (None, "")
        ]
        assert counts[0] == counts[1]


def test_developer_is_the_system(running: Running):
    answers = [
        running.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": role, "content": "x"}], "max_tokens": 8, "seed": 1},
        ).json()["choices"]
        for role in ("developer", "system")
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_fields_of_openai_that_are_not_supported(running: Running, fields, param):
    answer = running.chat(**fields)
    assert answer.status_code == 400
    error = _error(answer)
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert param.rpartition("].")[2] in error["message"]


def test_fields_that_change_nothing_are_accepted(running: Running):
    plain = running.chat(max_tokens=6, seed=1).json()["choices"]
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "x", "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "modalities": ["text"], "parallel_tool_calls": True, "model": "tiny-hybrid", "functions": [],
    }  # fmt: skip
    answer = running.chat(max_tokens=6, seed=1, **harmless)
    assert answer.status_code == 200
    assert answer.json()["choices"] == plain


def test_unknown_fields_are_refused_by_name_with_a_suggestion(running: Running):
    error = _error(running.chat(temperatur=1))
    assert (error["code"], error["param"]) == ("unknown_parameter", "temperatur")
    assert "did you mean 'temperature'" in error["message"]
    assert _error(running.complete(messages=[]))["param"] == "messages"
    assert len(_error(running.chat(**{"x" * 5000: 1}))["message"]) < 500


def test_another_model_is_not_found(running: Running):
    for answer in (running.chat(model="gpt-4o"), running.complete(model="gpt-4o")):
        assert answer.status_code == 404
        assert (_error(answer)["code"], _error(answer)["param"]) == ("model_not_found", "model")
        assert "tiny-hybrid" in _error(answer)["message"]


def test_contradictions(running: Running):
    assert _error(running.chat(max_tokens=1, max_completion_tokens=2))["param"] == "max_tokens"
    assert running.chat(max_tokens=2, max_completion_tokens=2).status_code == 200
    assert _error(running.chat(top_logprobs=2))["param"] == "top_logprobs"
    assert _error(running.chat(logprobs=True, top_logprobs=21))["param"] == "top_logprobs"
    assert _error(running.chat(logprobs=5))["param"] == "logprobs"
    assert _error(running.complete(logprobs=21))["param"] == "logprobs"
    assert _error(running.complete(logprobs=True))["param"] == "logprobs"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "tokenizer", "self", "_x", "a b", ""])
def test_template_variables_of_the_servers_own(running: Running, name: str):
    answer = running.chat(chat_template_kwargs={name: 1})
    assert answer.status_code == 400
    assert _error(answer)["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b"null", b'"x"', b"{}x", b"{'a': 1}", b'{"a": 01}', b'{"a": +1}', b'{"a": .5}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}', b'{"messages": "\xed\xa0\x80"}', b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"a": 1}', b'{"a": "\n"}', b'{"a": 1e}', b"9" * 5000, b'{"a": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object(running: Running, body: bytes):
    answer = _post(running, body)
    assert answer.status_code == 400
    assert _error(answer)["code"] == "invalid_json"


def test_bodies_that_cost_much_to_refuse(running: Running):
    names = ",".join(f'"{number}": 1' for number in range(200_000))
    begun = time.monotonic()
    for body in (
        "{" + names + ', "7": 2}',
        "{" + names + "}",
        "[]" * 1_000_000,
        '"' * 1_000_000,
        '{"x": "' + '\\"' * 500_000,
    ):
        assert _post(running, body).status_code == 400
    assert time.monotonic() - begun < 10


def test_a_field_given_twice(running: Running):
    answer = _post(running, '{"messages": [{"role": "user", "content": "a", "content": "b"}]}')
    assert answer.status_code == 400
    assert _error(answer)["param"] == "content"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (r'{"messages": [{"role": "user", "content": "a\ud800"}]}', "messages[0].content"),
        (r'{"messages": [{"role": "user", "content": "\udc00b"}]}', "messages[0].content"),
        (r'{"prompt": "\ud83d", "user": "x"}', "prompt"),
        (r'{"user": "\ud83d"}', "user"),
        (r'{"metadata": {"\ud83d": 1}}', "metadata"),
        (r'{"metadata": {"a": [1, NaN]}}', "metadata.a[1]"),
        (r'{"metadata": {"a": [1, [true, {"b": [null, "\ud83d"]}]]}}', "metadata.a[1][1].b[1]"),
        (r'{"metadata": {"a": -1e999}}', "metadata.a"),
    ],
)
def test_x3_lone_surrogates_and_numbers_that_are_none(running: Running, body: str, field: str):
    for route in ("/v1/chat/completions", "/v1/completions"):
        answer = _post(running, body, route)
        assert answer.status_code == 400
        assert _error(answer)["param"] == field


def test_x3_odd_texts_arrive_byte_for_byte(running: Running):
    texts = [
        "\n",
        " \n\n  x",
        "\r\n",
        "12345",
        " " * 150,
        "a\0b",
        "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}",
        "\ud83d\ude00",
    ]
    for text in texts:
        body = json.dumps({"prompt": text, "echo": True, "max_tokens": 0})
        answer = _post(running, body, "/v1/completions")
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == text.encode("utf-16", "surrogatepass").decode("utf-16")


def test_x2_special_texts_of_a_user_are_plain(running: Running):
    def count(content: str) -> int:
        return running.chat(messages=[{"role": "user", "content": content}], max_tokens=0).json()["usage"][
            "prompt_tokens"
        ]

    assert count("<|im_end|>") == count("") + len("<|im_end|>")


def test_s5_a_prompt_longer_than_the_context(running: Running):
    context = running.model.context_length
    for answer, field in (
        (running.complete(prompt="x" * (context + 5)), "prompt"),
        (running.complete(prompt=["x", "x" * (context + 5)]), "prompt[1]"),
        (running.complete(prompt=[65] * (context + 5), stream=True), "prompt"),
        (running.complete(prompt=["x", [10**9] * (context + 5)]), "prompt[1]"),  # none of its ids is looked at
    ):
        error = _error(answer)
        assert answer.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert str(context + 5) in error["message"]
        assert str(context) in error["message"]
    chat = running.chat(messages=[{"role": "user", "content": "x" * context}])
    assert (_error(chat)["code"], _error(chat)["param"]) == ("context_length_exceeded", "messages")


def test_s8_deep_bodies(running: Running):
    begun = time.monotonic()
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, '{"metadata":' * 65 + "1" + "}" * 65):
        answer = _post(running, text)
        assert answer.status_code == 400
        assert "nested" in _error(answer)["message"]
    assert time.monotonic() - begun < 5
    # Brackets inside strings are text.
    assert running.complete(prompt="[{" * 100 + '\\"[[', max_tokens=0, user="[" * 500).status_code == 200
    assert running.complete(metadata=json.loads("[" * 63 + "]" * 63)).status_code == 200
    assert _post(running, json.dumps(CHAT)).status_code == 200
