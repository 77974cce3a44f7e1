"""Prompts in tokens: the model's own template around what users wrote.

What a user writes never becomes a special token, however it is spelled. A template's text and a
user's text come out of the template as one string, and the tokenizer reads special tokens in all
of it; so where a user's text spells one, or begins or ends like one, a marker is put into it
before rendering. A special token that holds a marker afterwards is cut there, and the parts are
given to the tokenizer one by one. Everything else is tokenized as one piece, as in training.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshnet_gguf.chat import ChatMessage
from meshnet_gguf.client import Vocabulary
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway._requests import ChatRequest, Message
from meshnet_gguf.gateway._tool_format import GENERIC, ToolFormat, find_format
from meshnet_gguf.gateway.template_process import TemplateRenderer
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["SpecialTexts", "chat_pieces", "tool_format"]

_MAX_CUTS = 256
# The private use area of the basic plane: nobody's text, and one escape in JSON.
_MARKERS = range(0xE000, 0xF900)


class SpecialTexts:
    """The texts that a tokenizer reads as special tokens.

    specials = SpecialTexts(["<|im_start|>", "<|im_end|>"])
    marked = specials.mark("a <|im_end|>", marker)   # the marker after the first "<"
    specials.pieces(rendered, marker)                # the text, cut where a marker says so
    """

    def __init__(self, texts: Sequence[str]) -> None:
        # A text of one character cannot be cut; no model has one that is not plain text as well.
        self._texts = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
        self._longest = len(self._texts[0]) if self._texts else 0
        # With a look-ahead matches may overlap; the longest text at a place comes first.
        self._pattern = (
            re.compile("(?=(" + "|".join(map(re.escape, self._texts)) + "))")
            if self._texts
            else None
        )
        self._beginnings = {text[:n] for text in self._texts for n in range(1, len(text))}
        self._ends = {text[-n:] for text in self._texts for n in range(1, len(text))}
        self._all = "\0".join(self._texts)

    def mark(self, text: str, marker: str, *, edges: bool = True) -> str:
        """`text` with a marker in everything that could become (a part of) a special token.

        With `edges` also at its ends, where they and a template's text could make one.
        """
        if self._pattern is None or not text:
            return text
        places = {match.start() + 1 for match in self._pattern.finditer(text)}
        if edges:
            # Templates trim: the markers belong inside the white space.
            body = text.strip()
            begin = text.find(body)
            places |= {begin + place for place in self._edges(body)}
        cuts = [0, *sorted(places), len(text)]
        return marker.join(text[a:b] for a, b in itertools.pairwise(cuts))

    def _edges(self, text: str) -> set[int]:
        edges = set()
        lengths = range(1, min(self._longest, len(text) + 1))
        inside = text in self._all
        if inside or any(text[:length] in self._ends for length in lengths):
            edges.add(0)
        if inside or any(text[-length:] in self._beginnings for length in lengths):
            edges.add(len(text))
        return edges if text else set()

    def pieces(self, rendered: str, marker: str) -> list[str]:
        """`rendered` without markers, cut at those that lie in a special token's text.

        Raises MeshnetError (FIELD_OUT_OF_BOUNDS) when it would be cut into too many pieces.
        """
        rendered = rendered.replace(f"\\u{ord(marker):04x}", marker)
        parts = rendered.split(marker)
        text = "".join(parts)
        if len(parts) == 1 or self._pattern is None:
            return [text] if text else []
        marks, place = [], 0
        for part in parts[:-1]:
            place += len(part)
            marks.append(place)
        cuts = set()
        for match in self._pattern.finditer(text):
            # Of all texts that begin here the longest holds the others' places as well.
            begin, end = match.start(), match.start() + len(match.group(1))
            inside = bisect.bisect_right(marks, begin)
            while inside < len(marks) and marks[inside] < end:
                cuts.add(marks[inside])
                inside += 1
        if len(cuts) > _MAX_CUTS:
            raise MeshnetError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                f"expected messages that spell the model's special tokens at most {_MAX_CUTS} "
                f"times, got {len(cuts)}; leave them away",
            )
        edges = [0, *sorted(cuts), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True)
class _Marked:
    specials: SpecialTexts
    marker: str

    def text(self, value: str) -> str:
        return self.specials.mark(value, self.marker)

    def data(self, value: Any) -> Any:
        """Values that templates write as JSON, in quotes, and compare with words of their own."""
        if isinstance(value, str):
            return self.specials.mark(value, self.marker, edges=False)
        if isinstance(value, Mapping):
            return {self.data(key): self.data(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.data(item) for item in value]
        return value


def _marker_for(texts: str) -> str:
    for code in _MARKERS:
        if chr(code) not in texts and f"\\u{code:04x}" not in texts:
            return chr(code)
    raise MeshnetError(
        errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
        "expected messages that leave one character of the private use area (U+E000 to U+F8FF) "
        "unused, got all of them",
    )


def _arguments(text: str) -> Any:
    # Templates write arguments with tojson: an object, where the client's text is one.
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _template_message(message: Message, marked: _Marked, form: ToolFormat) -> ChatMessage:
    extra: dict[str, Any] = {}
    content = marked.text(message.text)
    if message.name is not None:
        extra["name"] = marked.text(message.name)
    if message.tool_call_id is not None:
        extra["tool_call_id"] = marked.text(message.tool_call_id)
    if message.reasoning_content is not None:
        extra["reasoning_content"] = marked.text(message.reasoning_content)
    if message.role == "tool" and not form.writes_calls:
        return ChatMessage("user", f"<tool_response>\n{content}\n</tool_response>")
    if message.tool_calls and not form.writes_calls:
        calls = [
            form.example(marked.text(call.function.name), marked.text(call.function.arguments))
            for call in message.tool_calls
        ]
        content = "\n".join([content, *calls] if content else calls)
    elif message.tool_calls:
        extra["tool_calls"] = [
            {
                "id": marked.text(call.id),
                "type": "function",
                "function": {
                    "name": marked.text(call.function.name),
                    "arguments": marked.data(
                        call.function.arguments
                        if form.arguments_as_text
                        else _arguments(call.function.arguments)
                    ),
                },
            }
            for call in message.tool_calls
        ]
    role = "system" if message.role == "developer" else message.role
    return ChatMessage(role, content, extra)


def _template_messages(
    request: ChatRequest, marked: _Marked, form: ToolFormat, tools: Sequence[Mapping[str, Any]]
) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    answered = False
    for message in request.messages:
        turn = _template_message(message, marked, form)
        if answered and turn.role == "user" and message.role == "tool":
            # Several answers are one turn: many templates want users and models to alternate.
            turn = ChatMessage("user", f"{messages.pop().content}\n{turn.content}")
        answered = message.role == "tool"
        messages.append(turn)
    if not tools or form.writes_tools:
        return messages
    said, first = _description(marked, form, tools), messages[0]
    if first.role == "system":
        return [ChatMessage("system", f"{first.content}\n\n{said}", first.extra), *messages[1:]]
    if form.system_role:
        return [ChatMessage("system", said), *messages]
    return [ChatMessage(first.role, f"{said}\n\n{first.content}", first.extra), *messages[1:]]


def _description(marked: _Marked, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools, for a template that says nothing about them."""
    lines = "\n".join(
        marked.text(json.dumps(tool["function"], ensure_ascii=False)) for tool in tools
    )
    example = form.example("NAME", "ARGUMENTS")
    return (
        f"You can call these functions, each described by a JSON schema:\n{lines}\n"
        "To call one, write this, with the function's name and its arguments as a JSON object:\n"
        f"{example}\nIts result comes in the next message."
    )


def chat_template(vocabulary: Vocabulary, *, with_tools: bool) -> str:
    """The template for a conversation with or without tools."""
    template = vocabulary.chat_template
    return vocabulary.named_chat_templates.get("tool_use", template) if with_tools else template


async def tool_format(renderer: TemplateRenderer, vocabulary: Vocabulary) -> ToolFormat:
    """How the model's template writes calls of tools."""
    template = chat_template(vocabulary, with_tools=True)

    async def render(
        messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], begin: bool
    ) -> str:
        return await renderer.render(
            template,
            messages,
            tools=tools or None,
            add_generation_prompt=begin,
            bos_token=vocabulary.special_text("bos"),
            eos_token=vocabulary.special_text("eos"),
        )

    ends = [
        token.piece.decode("utf-8", "replace")
        for token in vocabulary.control_tokens
        if token.token_id in vocabulary.end_of_generation_ids
    ]
    return await find_format(render, ends=ends)


async def chat_pieces(
    renderer: TemplateRenderer,
    vocabulary: Vocabulary,
    specials: SpecialTexts,
    request: ChatRequest,
    form: ToolFormat = GENERIC,
    beginning: str = "",
) -> list[str]:
    """The conversation as the template writes it, cut where no special token may be read.

    `form` is the template's form of tool calls, `beginning` what the answer is to begin with.

    Raises MeshnetError as TemplateRenderer.render() does.
    """
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    if request.tool_choice == "none":
        tools = []
    template = chat_template(vocabulary, with_tools=bool(tools))
    # Of the whole request, so that no part of it can look like the marker.
    marker = _marker_for(template + request.model_dump_json())
    marked = _Marked(specials, marker)
    rendered = await renderer.render(
        template,
        _template_messages(request, marked, form, tools),
        tools=[{"type": "function", "function": marked.data(tool["function"])} for tool in tools]
        if tools and form.writes_tools
        else None,
        variables=marked.data(request.chat_template_kwargs or {}),
        bos_token=vocabulary.special_text("bos"),
        eos_token=vocabulary.special_text("eos"),
    )
    return specials.pieces(rendered + beginning, marker)
