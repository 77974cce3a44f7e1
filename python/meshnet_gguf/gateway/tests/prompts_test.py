"""No text of a user becomes a special token; everything else stays as the template wrote it."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshnet_gguf.client import Vocabulary
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway import TemplateRenderer
from meshnet_gguf.gateway._prompts import SpecialTexts, chat_pieces, tool_format
from meshnet_gguf.gateway._requests import ChatRequest, parse

from proto.meshnet.shard.v1 import errors_pb2

SPECIALS = SpecialTexts(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
M = "\ue000"


def spelled(text: str) -> int:
    """How many special tokens a tokenizer reads in a piece."""
    return sum(text.count(special) for special in ("<|im_start|>", "<|im_end|>", "<s>", "</s>"))


def rendered(user: str) -> list[str]:
    return SPECIALS.pieces(f"<|im_start|>user\n{user}<|im_end|>\n", M)


def test_plain_text_is_one_piece() -> None:
    for text in ("Hello", "a < b", "end", "<", "", "im_end", "|>", "x<"):
        assert rendered(SPECIALS.mark(text, M)) == [f"<|im_start|>user\n{text}<|im_end|>\n"]


def test_a_spelled_token_is_cut() -> None:
    pieces = rendered(SPECIALS.mark("a<|im_end|>b", M))
    assert pieces == ["<|im_start|>user\na<", "|im_end|>b<|im_end|>\n"]


def test_a_token_made_with_the_templates_help_is_cut() -> None:
    assert SPECIALS.pieces("<|im_" + SPECIALS.mark("end|>", M), M) == ["<|im_", "end|>"]
    assert SPECIALS.pieces("<|" + SPECIALS.mark(" im_end ", M).strip() + "|>", M) == [
        "<|",
        "im_end",
        "|>",
    ]
    assert SPECIALS.pieces(SPECIALS.mark("</", M) + "s>", M) == ["</", "s>"]


def test_a_marker_that_json_has_escaped_is_found() -> None:
    assert SPECIALS.pieces("<\\ue000|im_end|>", M) == ["<", "|im_end|>"]


def test_too_many_are_refused() -> None:
    assert len(rendered(SPECIALS.mark("<s>" * 256, M))) == 257
    with pytest.raises(MeshnetError) as caught:
        rendered(SPECIALS.mark("<s>" * 257, M))
    assert caught.value.reason == errors_pb2.REASON_FIELD_OUT_OF_BOUNDS


PARTS = st.lists(
    st.sampled_from(
        ["<", "|", ">", "/", "s", "im_", "end", "start", "<|im_end|>", "<s>", " ", "\n", "a"]
    ),
    max_size=12,
).map("".join)


@given(PARTS, PARTS, PARTS, st.booleans())
def test_only_the_templates_own_special_tokens_are_read(
    before: str, user: str, after: str, trim: bool
) -> None:
    marked = SPECIALS.mark(user, M)
    text = user
    if trim:
        marked, text = marked.strip(), user.strip()
    pieces = SPECIALS.pieces(before + marked + after, M)
    assert "".join(pieces) == before + text + after
    assert all(pieces)
    # What a tokenizer may read lies in the template's own text alone.
    inside = range(len(before), len(before) + len(text))
    edges = list(itertools.accumulate((len(piece) for piece in pieces), initial=0))
    for begin, piece in zip(edges, pieces, strict=False):
        for special in ("<|im_start|>", "<|im_end|>", "<s>", "</s>"):
            place = piece.find(special)
            while place >= 0:
                first, last = begin + place, begin + place + len(special) - 1
                # Around no text at all the template's own parts may meet.
                assert not text or last < inside.start or first >= inside.stop
                place = piece.find(special, place + 1)


def test_a_model_without_special_tokens_needs_no_markers() -> None:
    assert SpecialTexts([]).mark("<s>", M) == "<s>"
    assert SpecialTexts([]).pieces("a", M) == ["a"]


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
CONVERSATION: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}},
                {"id": "2", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "2", "content": "night"},
    ],
    "tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
}
TOLD = """\
You can call these functions, each described by a JSON schema:
{"name": "now", "parameters": {"type": "object"}}
To call one, write this, with the function's name and its arguments as a JSON object:
<tool_call>
{"name": "NAME", "arguments": ARGUMENTS}
</tool_call>
Its result comes in the next message."""
TALKED = """\
[assistant]<tool_call>
{"name": "now", "arguments": {"zone": "UTC"}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>
[user]<tool_response>
noon
</tool_response>
<tool_response>
night
</tool_response>
[assistant]"""


async def told(template: str, body: dict[str, Any]) -> str:
    """The prompt of a model whose template knows nothing of tools."""
    vocabulary = Vocabulary(
        size=256,
        add_bos=False,
        add_eos=False,
        special_tokens=(),
        end_of_generation_ids=frozenset(),
        chat_template=template,
        named_chat_templates={},
    )
    request = parse(ChatRequest, json.dumps(body).encode())
    async with TemplateRenderer() as renderer:
        form = await tool_format(renderer, vocabulary)
        return "".join(
            await chat_pieces(renderer, vocabulary, SpecialTexts([]), request, form, "->")
        )


async def test_tools_that_a_template_does_not_know_stand_in_messages() -> None:
    assert await told(PLAIN, CONVERSATION) == f"[system]{TOLD}\n[user]Time?\n{TALKED}->"
    system = {"role": "system", "content": "Be short."}
    body = {**CONVERSATION, "messages": [system, *CONVERSATION["messages"]]}
    assert (await told(PLAIN, body)).startswith(f"[system]Be short.\n\n{TOLD}\n[user]Time?\n")


async def test_a_template_without_a_system_tells_the_user() -> None:
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    )
    assert await told(refusing, CONVERSATION) == f"[user]{TOLD}\n\nTime?\n{TALKED}->"
