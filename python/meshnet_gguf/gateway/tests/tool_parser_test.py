"""What a model writes around calls of tools, read back: however it is cut into pieces."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshnet_gguf.gateway._tool_format import GENERIC, Tags, ToolFormat
from meshnet_gguf.gateway._tool_parser import CallArguments, CallBegun, Content, ToolParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "now": {"type": "object"},
}
HERMES = replace(GENERIC, writes_calls=True)
LIST = ToolFormat("list", "[TOOL_CALLS]", again=", ")
BARE = ToolFormat("object", "", arguments_key="parameters")
NAMED = ToolFormat(
    "named", "<call>probe0001<name>", "</call><call>probe0001<name>", "</call>", ":0"
)
TAGGED = ToolFormat(
    "tagged",
    "<tool_call>\n<function=",
    "</function>\n</tool_call>\n<tool_call>\n<function=",
    "</function>\n</tool_call>",
    ">\n",
    tags=Tags("<parameter=", ">\n", ">\n", "\n</parameter>\n"),
)
SAID = ToolFormat(
    "tagged",
    '<calls>\n<invoke name="',
    '</invoke>\n<invoke name="',
    "</invoke>\n</calls>",
    '">\n',
    tags=Tags('<p name="', '" string="true">', '" string="false">', "</p>\n"),
)
FORMS = [HERMES, LIST, BARE, NAMED, TAGGED, SAID]

Read = tuple[str, list[tuple[str, str]]]


def read(form: ToolFormat, pieces: list[str], limit: int = 0) -> Read:
    """The content, and name and arguments of each call."""
    parser = ToolParser(form, SCHEMAS, limit=limit)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    calls = [event for event in events if isinstance(event, CallBegun)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.call_id for call in calls}) == len(calls)
    arguments = [""] * len(calls)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    return content, [(call.name, text) for call, text in zip(calls, arguments, strict=True)]


CASES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "Hello", "Hello", []),
    (
        HERMES,
        'Well.\n\n<tool_call>\n{"name": "now", "arguments": {"a": "}\\""}}\n</tool_call>',
        "Well.",
        [("now", '{"a": "}\\""}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\n'
        '<tool_call>\n{"arguments": {"city": "K"}, "name": "get_weather"}</tool_call>\nDone.',
        "Done.",
        [("now", "{}"), ("get_weather", '{"city": "K"}')],
    ),
    # None of ours, no object, not finished: content as it came.
    (
        HERMES,
        'a <tool_call>{"name": "rm", "arguments": {}}</tool_call> b',
        'a <tool_call>{"name": "rm", "arguments": {}}</tool_call> b',
        [],
    ),
    (HERMES, "<tool_call> is a mark", "<tool_call> is a mark", []),
    (HERMES, "1 <tool_", "1 <tool_", []),
    (HERMES, '<tool_call>\n{"name": "no', '<tool_call>\n{"name": "no', []),
    # Broken off in its arguments: what came is passed on.
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": 1', "", [("now", '{"a": 1')]),
    (HERMES, '<tool_call>{"name": "now"}', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', "", [("now", '{"a": 1}')]),
    (
        LIST,
        '[TOOL_CALLS] [{"name": "now", "arguments": {"z": [1]}, "id": "123456789"}, '
        '{"name": "get_weather", "arguments": {"city": "K"}}]',
        "",
        [("now", '{"z": [1]}'), ("get_weather", '{"city": "K"}')],
    ),
    (LIST, '[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [("now", "{}")]),
    (BARE, ' {"name": "now", "parameters": {"a": null}}', "", [("now", '{"a": null}')]),
    (BARE, '{"colour": "red", "name": "now"}', '{"colour": "red", "name": "now"}', []),
    (BARE, 'See {"name": "now", "parameters": {}}', 'See {"name": "now", "parameters": {}}', []),
    (
        NAMED,
        '<call>x-7<name>now:12{"a": {}}</call><call>y<name>get_weather:3{}</call>',
        "",
        [("now", '{"a": {}}'), ("get_weather", "{}")],
    ),
    (NAMED, "<call>x<name>rm:1{}</call>", "<call>x<name>rm:1{}</call>", []),
    (
        TAGGED,
        "So:\n<tool_call>\n<function=get_weather>\n<parameter=city>\n  42\n</parameter>\n"
        "<parameter=days>\n42\n</parameter>\n</function>\n</tool_call>",
        "So:",
        [("get_weather", '{"city": "  42", "days": 42}')],
    ),
    (TAGGED, "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
    (
        SAID,
        '<calls>\n<invoke name="now">\n<p name="a" string="true">7</p>\n'
        '<p name="b" string="false">[7]</p>\n</invoke>\n<invoke name="now">\n</invoke>\n</calls>',
        "",
        [("now", '{"a": "7", "b": [7]}'), ("now", "{}")],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_read(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(HERMES, SCHEMAS)
    assert parser.push('<tool_call>{"name": "now"') == []
    [begun] = parser.push(",")
    assert isinstance(begun, CallBegun)
    assert parser.push(' "arguments": {"a": "on') == [CallArguments(0, '{"a": "on')]
    assert parser.push('e"}') == [CallArguments(0, 'e"}')]
    assert parser.push("}</tool_call>") == []


def test_one_call_is_enough_where_only_one_may_be() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(HERMES, [text * 3, "more"], limit=1) == ("", [("now", "{}")])


def test_a_call_that_somebody_else_completes() -> None:
    parser = ToolParser(HERMES, SCHEMAS, pause_at={"now"})
    text = 'Hm.\n<tool_call>\n{"name": "now", "arguments": {"bro'
    assert [type(event) for event in parser.push(text)] == [Content, CallBegun]
    assert parser.paused
    assert text[: parser.body_start] == "Hm.\n<tool_call>\n"
    assert parser.last_name == "now"
    parser.resume()
    assert parser.push("\n</tool_call>\n<tool_call>\nx") == [Content("<tool_call>\nx")]


PARTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", ", ", "\n", " ", "Hi", "<",
            '{"name": "now", "arguments": {"a": [1, "}"]}}',
            '{"name": "now", "parameters": {}}',
            '{"name": "get_weather", "arguments": ', '{"city": "\u00e4\\""}', "}", "{", '"',
            "<call>x<name>", "now:1", "get_weather:22", "</call>", "{}",
            "<function=now>\n", "<function=", "<parameter=city>\n", "\n</parameter>\n",
            "</function>\n", '<calls>\n<invoke name="now">\n', '<p name="b" string="false">',
            '<p name="b" string="true">', "</p>\n", "</invoke>\n", "</calls>", "7", "now",
        ]
    ),
    max_size=16,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMS), PARTS, st.data())
def test_pieces_do_not_matter(form: ToolFormat, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = read(form, [text])
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *places, len(text)]
    assert read(form, [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert read(form, list(text)) == whole


@settings(deadline=None)
@given(
    st.sampled_from([HERMES, LIST, BARE, NAMED]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.booleans(),
)
def test_any_arguments_come_through(form: ToolFormat, value: object, ascii_only: bool) -> None:
    arguments = json.dumps({"v": value}, ensure_ascii=ascii_only)
    assert read(form, list(form.example("now", arguments))) == ("", [("now", arguments)])


@settings(deadline=None)
@given(st.text(), st.integers(), st.booleans())
def test_any_tagged_text_comes_through(text: str, number: int, last: bool) -> None:
    if "</parameter>" in text or text.startswith("<![CDATA["):
        return
    pairs = [("city", text), ("days", str(number))]
    if last:
        pairs.reverse()
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    written = f"<tool_call>\n<function=get_weather>\n{body}</function>\n</tool_call>"
    content, [(name, arguments)] = read(TAGGED, list(written))
    assert (content, name) == ("", "get_weather")
    assert json.loads(arguments) == {"city": text, "days": number}
