from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_data import FAMILIES, read_metadata, read_tokens, tokenizer_of

from kinetic_core.errors import RequestError, TemplateError
from kinetic_core.text import ChatTemplate, Tokenizer
from kinetic_core.text.template import CHATML, MAX_DEPTH
from kinetic_core.text.template_worker import Renderer

HI = [{"role": "user", "content": "Hi"}]
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, **variables)


def test_reference_chats(tokenizer: Tokenizer, family: str) -> None:
    template = ChatTemplate.from_metadata(read_metadata(family), tokenizer)
    for chat in read_tokens(family)["chats"]:
        prompt = chat["add_generation_prompt"]
        assert template.render(chat["messages"], prompt) == chat["text"]
        assert template.encode(tokenizer, chat["messages"], prompt) == chat["ids"]


def test_environment_is_that_of_published_templates() -> None:
    # trim_blocks and lstrip_blocks
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"
    # loop controls, and the tag that marks answers for training
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert (
        render("{{ 2 * 'ab' }}{{ 7 ** 2 }}{{ '%s-%03d' % ('x', 5) }}{{ [1] + [2] }}{{ 7 % 4 }}") == "abab49x-005[1, 2]3"
    )
    assert render("{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|{{ add_generation_prompt }}") == "||True|True"


def test_tojson_like_hugging_face() -> None:
    value = {"b": "<é'&>", "a": [1, None]}
    assert render("{{ x | tojson }}", x=value) == '{"b": "<é\'&>", "a": [1, null]}'
    assert render("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", x=value) == '{"a":[1,null],"b":"<é\'&>"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"
    assert render("{{ x | tojson(ensure_ascii=true) }}", x="é") == '"\\u00e9"'


def test_variables_reach_the_template() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}{{ tools[0].name }}"
    template = ChatTemplate(source, bos_token="<s>")
    assert template.render(HI, tools=[{"name": "f"}], enable_thinking=False) == "False1f"


def test_variables_of_any_name() -> None:
    names = {"messages": "no", "tokenizer": "no", "self": "s", "bos_token": "no", "source": "t"}
    source = "{{ messages[0].content }}{{ self is defined }}{{ bos_token }}{{ source }}"
    template = ChatTemplate(source, bos_token="<s>")
    assert template.render(HI, **names) == "HiTrue<s>t"
    tokenizer = tokenizer_of("llama")
    assert tokenizer.decode(template.encode(tokenizer, HI, **names)) == "HiTrue<s>t"
    with pytest.raises(RequestError, match="not tools") as caught:
        template.render(HI, **{"tools": 5})
    assert caught.value.field == "tools"


def test_tool_template() -> None:
    template = ChatTemplate("plain", tool_source="{{ tools[0] }}")
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=["f"]) == "f"
    metadata = {**read_metadata("llama"), "tokenizer.chat_template.tool_use": "tool"}
    assert ChatTemplate.from_metadata(metadata, tokenizer_of("llama")).tool_source == "tool"


def test_default_template() -> None:
    metadata = read_metadata("llama")
    del metadata["tokenizer.chat_template"]
    template = ChatTemplate.from_metadata(metadata, tokenizer_of("llama"))
    assert template.source == CHATML
    assert template.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(TemplateError, match=r"no chat template.*tokenizer\.chat_template"):
        ChatTemplate.from_metadata({}, tokenizer_of("llama3rope"))
    with pytest.raises(TemplateError, match="not text"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 3}, tokenizer_of("llama"))


def test_bos_is_there_once() -> None:
    tokenizer = tokenizer_of("lfm2")
    plain = tokenizer.encode("Hi", add_bos=False)
    for source in ("{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"):
        template = ChatTemplate(source, bos_token="<|startoftext|>")
        assert template.encode(tokenizer, HI) == [1, *plain]
    assert ChatTemplate("{{ messages[0].content }}").encode(tokenizer_of("llama"), HI) == tokenizer_of("llama").encode(
        "Hi"
    )


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in set(tokenizer.vocabulary.special.values())]


def test_x2_only_the_template_names_special_tokens() -> None:
    tokenizer = tokenizer_of("qwen35")
    text = "<think>ok</think><tool_call>"
    template = ChatTemplate(text + "{{ messages[0].content }}")
    ids = template.encode(tokenizer, [{"role": "user", "content": text + "<|im_end|>"}])
    assert ids == [
        *(1022, *tokenizer.encode("ok"), 1023, 1020),
        *tokenizer.encode(text + "<|im_end|>"),
    ]
    assert tokenizer.decode(ids) == text + text + "<|im_end|>"


def test_answers_keep_user_defined_tokens() -> None:
    tokenizer = tokenizer_of("qwen35")
    template = ChatTemplate("{{ messages[0].content }}")
    text = "<think>a</think><|im_end|>"
    ids = template.encode(tokenizer, [{"role": "assistant", "content": text}])
    assert specials(tokenizer, ids) == [1022, 1023]
    assert tokenizer.decode(ids) == text
    # A template that drops the reasoning of old answers finds it.
    template = ChatTemplate("{{ messages[0].content.split('</think>')[-1] }}")
    assert tokenizer.decode(template.encode(tokenizer, [{"role": "assistant", "content": "<think>a</think>b"}])) == "b"


def test_nested_values_names_tools_and_variables_are_text() -> None:
    tokenizer = tokenizer_of("qwen35")
    source = "{{ messages | tojson }}{{ tools | tojson(ensure_ascii=true) }}{{ extra }}{{ messages[0].role }}"
    bad = "<|im_end|>"
    messages = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": bad, "arguments": {bad: [bad, {"x": bad}]}}}],
        },
        {"role": bad, "content": bad, "name": bad},
    ]
    ids = ChatTemplate(source).encode(tokenizer, messages, tools=[{"d": bad + "\\ufdd0\u00e9"}], extra={bad: bad})
    assert specials(tokenizer, ids) == []
    text = tokenizer.decode(ids)
    assert text.count(bad) == 10
    assert '[{"d": "' + bad + '\\\\ufdd0\\u00e9"}]' in text
    assert text.endswith("{'" + bad + "': '" + bad + "'}assistant")


def test_roles_may_be_part_of_special_tokens() -> None:
    metadata = read_metadata("llama")
    metadata["tokenizer.ggml.tokens"][0] = "<|user|>"
    tokenizer = Tokenizer.from_metadata(metadata)
    template = ChatTemplate("{{ '<|' + messages[0].role + '|>' + messages[0].content }}")
    assert specials(tokenizer, template.encode(tokenizer, HI)) == [0]
    metadata["tokenizer.ggml.tokens"][0] = "@user"
    at = Tokenizer.from_metadata(metadata)
    assert specials(at, ChatTemplate("{{ '@' + messages[0].role }}").encode(at, HI)) == [0]
    # Any other role is text, and so is a message that would complete a token.
    assert specials(tokenizer, template.encode(tokenizer, [{"role": "user|><|user", "content": "x"}])) == []
    template = ChatTemplate("<|{{ messages[0].content | trim }}<|us{{ messages[0].content }}")
    assert specials(tokenizer, template.encode(tokenizer, [{"role": "user", "content": " user|> er|> <|"}])) == []


def test_tojson_takes_marks_for_marks_only() -> None:
    text = Renderer().render("{{ x | tojson(true) }}", {"x": "\ufdd0\\ufdd0\\\ufdd0é"}, 1000, "\ufdd0")
    assert text == '"\ufdd0\\\\ufdd0\\\\\ufdd0\\u00e9"'


def test_one_character_special_tokens_in_messages() -> None:
    metadata = read_metadata("llama")
    metadata["tokenizer.ggml.tokens"][0] = "x"
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = ChatTemplate("x{{ messages[0].content }}").encode(tokenizer, [{"role": "user", "content": "ox x"}])
    assert specials(tokenizer, ids) == [0]
    assert tokenizer.decode(ids) == "xox x"


def test_a_refusal_quotes_messages_as_they_were() -> None:
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(RequestError, match=r"no: <\|im_end\|>"):
        template.encode(tokenizer_of("llama"), [{"role": "user", "content": "no: <|im_end|>"}])


def test_characters_used_as_marks_survive() -> None:
    tokenizer = tokenizer_of("qwen35")
    text = "\ufdd0<|im_end|>\U0001d000<\U0001d001\U0001fffe"
    template = ChatTemplate("\U0001d002{{ messages[0].content }}")
    ids = template.encode(tokenizer, [{"role": "user", "content": text}])
    assert tokenizer.decode(ids) == "\U0001d002" + text and specials(tokenizer, ids) == []
    # In the name of a value too.
    ids = ChatTemplate("{{ x }}<|im_end|>").encode(tokenizer, HI, x={"\U0001d000<|im_end|>": 1})
    assert tokenizer.decode(ids) == "{'\U0001d000<|im_end|>': 1}<|im_end|>"


parts = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<think>", "</think>", "<tool_call>", "<|start_of_role|>",
     "<|begin_of_text|>", "<|", "|>", "<", ">", "im_end", "think>", " ", "\n", "\ufdd0", "x", "user"]
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(
    texts=st.lists(st.lists(parts, max_size=6).map("".join), min_size=1, max_size=3), family=st.sampled_from(FAMILIES)
)
def test_no_message_adds_special_tokens(texts: list[str], family: str) -> None:
    tokenizer = tokenizer_of(family)
    template = ChatTemplate.from_metadata(read_metadata(family), tokenizer)
    messages = [{"role": "user", "content": text} for text in texts]
    ids = template.encode(tokenizer, messages)
    harmless = template.encode(tokenizer, [{"role": "user", "content": "x"} for _ in texts])
    assert specials(tokenizer, ids) == specials(tokenizer, harmless)
    assert tokenizer.decode(ids) == template.render(messages)


def test_content_in_parts() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": content}, *HI]
    # A template that reads strings gets strings, one that reads parts gets parts.
    assert render("{% for m in messages %}{{ m.content + ';' }}{% endfor %}", messages) == "a\nb;Hi;"
    source = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }},{% endif %}{% endfor %}"
        "{% endfor %}"
    )
    assert render(source, messages) == "a,b,Hi,"
    both = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    assert render(both, messages) == "a\nbHi"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (["x"], "messages[0]"),
        ([*HI, {"content": "x"}], "messages[1]"),
        ([{"role": 3, "content": "x"}], "messages[0]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([*HI, {"role": "user", "content": "", "x": ["\udfff"]}], "messages[1].x[0]"),
        ([{"role": "user", "content": "", "x": b"bytes"}], "messages"),
    ],
)
def test_malformed_messages(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ messages[0].content }}", messages)
    assert caught.value.field == field and field in str(caught.value)


def test_deep_nesting() -> None:
    value: Any = "x"
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RequestError, match=f"at most {MAX_DEPTH} levels"):
        ChatTemplate("x").encode(tokenizer_of("llama"), [{"role": "user", "content": "x", "deep": value}])
    looped: list[Any] = []
    looped.append(looped)
    with pytest.raises(RequestError, match="nested too deep"):
        ChatTemplate("x").encode(tokenizer_of("llama"), HI, tools=[{"x": looped}])


def test_s9_system_message_in_the_middle() -> None:
    order = ["user", "assistant", "system", "user"]
    messages = [{"role": role, "content": role} for role in order]
    with pytest.raises(RequestError, match=r"System message must be at the beginning") as caught:
        render(SYSTEM_FIRST, messages)
    assert caught.value.field == "messages[2]" and "messages[2]" in str(caught.value)
    assert render(SYSTEM_FIRST, sorted(messages, key=lambda m: m["role"] != "system")).startswith("<|im_start|>system")


def test_messages_that_a_working_template_fails_on() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="TypeError") as caught:
        render(source, [*HI, {"role": "assistant", "content": None}, *HI])
    assert caught.value.field == "messages[1]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "sandbox"),
        ("{{ cycler.__init__.__globals__ }}", "sandbox"),
        ("{{ messages.append(1) }}", "sandbox"),
        ("{{ 'a' * 200000000 }}", "exceeds its bounds.*a repetition of 200000000"),
        ("{{ 200000000 * [1] }}", "a repetition of 200000000"),
        ("{{ '%999999999d' % 1 }}", "huge width"),
        ("{{ '%*d' % (999999999, 1) }}", "huge width"),
        ("{{ 10 ** (10 ** 9) }}", "huge integer"),
        ("{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "huge integer"),
        (
            "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "a value of 8388608 items",
        ),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "characters of output"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("a\n{% if %}", r"not valid Jinja2.*\(line 2\)"),
        ("a\n{{ nope.x.y }}", r"failed.*'nope' is undefined.*\(line 2\)"),
        ("{{ range(100000000) | list }}", "Range too big"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% include 'x' %}", "failed"),
    ],
)
def test_g12_a_bad_template_is_a_named_error(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        render(source)
    assert render("{{ messages[0].content }}") == "Hi"
