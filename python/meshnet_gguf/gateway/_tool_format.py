"""How a chat template writes calls of tools, found by letting it write some.

A template is asked to render a conversation in which an assistant calls tools with names and
arguments that occur nowhere else; what stands around them is how its model was taught to call:

    object   <tool_call>{"name": "NAME", "arguments": {...}}</tool_call>
    list     [TOOL_CALLS][{"name": "NAME", "arguments": {...}}]
    named    <function=NAME>{...}</function>
    tagged   <function=NAME><parameter=KEY>VALUE</parameter></function>

A template that writes calls in none of these forms is served the generic way (GENERIC): calls are
objects between tags, inside ordinary messages. What a template does not say about the tools
themselves stands in a message as well.

    found = await find_format(render, ends=["<|im_end|>"])
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshnet_gguf.chat import ChatMessage
from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = [
    "GENERIC",
    "Render",
    "Tags",
    "ToolFormat",
    "common_length",
    "find_format",
    "new_call_id",
    "pattern_of",
]

# (messages, tools, whether the assistant's turn is to be begun) -> the text; raises MeshnetError.
Render = Callable[[Sequence[ChatMessage], Sequence[dict[str, Any]], bool], Awaitable[str]]

_CALL_ID = "probe0001"
_NAMES = ("probe_tool", "other_tool")
_THINKING = (("<think>", "</think>"), ("<|START_THINKING|>", "<|END_THINKING|>"))
_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def new_call_id() -> str:
    """Nine letters and digits: some templates take no other length."""
    return "".join(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in os.urandom(9))


def pattern_of(text: str) -> str:
    """A regular expression for what a template wrote: numbers, call ids and white space vary."""
    parts = re.split(rf"({_CALL_ID}|\d+|\s+)", text)
    return "".join(_pattern_part(part) for part in parts)


def _pattern_part(part: str) -> str:
    if part == _CALL_ID:
        return r"[\w.:-]{1,64}"
    if part.isdecimal():
        return r"\d+"
    return r"\s*" if part.isspace() else re.escape(part)


@dataclass(frozen=True)
class Tags:
    """What stands around a tagged call's parameters.

    `before_text` and `before_json` stand between a key and its value; they differ where the
    template says which values are text.
    """

    before_key: str
    before_text: str
    before_json: str
    after_value: str


@dataclass(frozen=True)
class ToolFormat:
    """Where a call begins and ends, and where its name and arguments stand.

    `opening` stands before the first call, `again` between two (empty where there is but one),
    `closing` after the last. In calls that are named or tagged `between` follows the name; the
    others have it under `name_key` in an object. `arguments_as_text`: the template wants the
    arguments of earlier calls as JSON text. `leave_thinking` ends what the prompt may have begun.
    The template itself writes calls (`writes_calls`), what the tools are (`writes_tools`) and what
    a system says (`system_role`).
    """

    shape: Literal["object", "list", "named", "tagged"]
    opening: str
    again: str = ""
    closing: str = ""
    between: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    tags: Tags | None = None
    arguments_as_text: bool = False
    leave_thinking: str = ""
    writes_calls: bool = True
    writes_tools: bool = True
    system_role: bool = True

    @property
    def trigger(self) -> str:
        """The part of `opening` that is the same for every call."""
        return self.opening.partition(_CALL_ID)[0].strip()

    @property
    def further(self) -> str:
        """What `trigger` is for a call that follows another."""
        return self.again.partition(_CALL_ID)[0].strip()

    @property
    def before_name(self) -> str:
        """What stands between `trigger` and a name, as a regular expression."""
        _, own, rest = self.opening.partition(_CALL_ID)
        return pattern_of(own + rest)

    @property
    def marks(self) -> str:
        """All text around calls."""
        tags = self.tags
        inner = (
            (tags.before_key, tags.before_text, tags.before_json, tags.after_value) if tags else ()
        )
        return "\n".join((self.opening, self.again, self.closing, self.between, *inner))

    def forced(self) -> ToolFormat:
        """The form of a call that a JSON schema holds: tags become an object."""
        if self.shape != "tagged":
            return self
        return replace(
            self, shape="object", opening="", again="", closing="", between="", tags=None
        )

    def announcement(self) -> str:
        """What stands before a forced call: `opening` up to what is the call's own."""
        return self.opening.partition(_CALL_ID)[0] + ("[" if self.shape == "list" else "")

    def until_name(self, call_id: str) -> str:
        """What stands between the announcement and the name of a forced call."""
        if self.shape == "named":
            _, own, rest = self.opening.partition(_CALL_ID)
            return (own and call_id) + rest
        return f'{{"{self.name_key or "name"}": "'

    def until_arguments(self, call_id: str) -> str:
        """What stands between the name and the arguments of a forced call."""
        if self.shape == "named":
            return self.between.replace(_CALL_ID, call_id)
        return f'", "{self.arguments_key or "arguments"}": '

    def after_arguments(self) -> str:
        """What ends a forced call, before whatever stands between calls."""
        return "" if self.shape == "named" else "}"

    def example(self, name: str, arguments: str) -> str:
        """A call as a message shows it. A tagged one is shown as an object."""
        form, call_id = self.forced(), new_call_id()
        begin = form.announcement() + form.until_name(call_id) + name
        end = form.after_arguments() + ("]" if form.shape == "list" else "") + form.closing
        return (begin + form.until_arguments(call_id) + arguments + end).strip()


GENERIC = ToolFormat(
    "object",
    opening="<tool_call>\n",
    again="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
    writes_calls=False,
    writes_tools=False,
)


def _tool(name: str, keys: Collection[str]) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": f"The {key}"} for key in keys}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}",
            "parameters": {"type": "object", "properties": properties, "required": list(keys)},
        },
    }


_TOOLS = [_tool(_NAMES[0], ["probe_key"]), _tool(_NAMES[1], ["other_key", "second_key"])]
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"probe_key": "probe_value"},
    {"other_key": "other_value", "second_key": 77},
)


def _turn(numbers: Sequence[int], *, as_text: bool) -> ChatMessage:
    calls = [
        {
            "id": f"probe000{number + 1}",
            "type": "function",
            "function": {
                "name": _NAMES[number],
                "arguments": json.dumps(_ARGUMENTS[number]) if as_text else _ARGUMENTS[number],
            },
        }
        for number in numbers
    ]
    return ChatMessage("assistant", "", {"tool_calls": calls})


async def find_format(render: Render, *, ends: Collection[str]) -> ToolFormat:
    """The form of a template's calls. `ends` are the texts of tokens that end a generation."""
    user = ChatMessage("user", "probe_question")

    async def tried(
        turns: Sequence[ChatMessage], begin: bool = False, before: Sequence[ChatMessage] = ()
    ) -> str:
        try:
            return await render([*before, user, *turns], [] if before else _TOOLS, begin)
        except MeshnetError as error:
            if error.reason not in (
                errors_pb2.REASON_FEATURE_UNSUPPORTED,
                errors_pb2.REASON_ARTIFACT_INVALID,
            ):
                raise
            return ""

    prompt = await tried([], begin=True)
    leave_thinking = _leave_thinking(prompt)
    said = await tried([], True, [ChatMessage("system", "probe_system")])
    answer = await tried([ChatMessage("assistant", "probe_content")])
    for as_text in (False, True):
        one = await tried([_turn([0], as_text=as_text)])
        other = await tried([_turn([1], as_text=as_text)])
        two = await tried([_turn([0, 1], as_text=as_text)])
        found = _Reading(prompt, answer, ends).format_of(one, other, two)
        if found is not None:
            return replace(
                found,
                arguments_as_text=as_text,
                leave_thinking=leave_thinking,
                system_role="probe_system" in said,
                writes_tools=all(name in prompt for name in _NAMES),
            )
    return replace(GENERIC, leave_thinking=leave_thinking, system_role="probe_system" in said)


def _leave_thinking(prompt: str) -> str:
    for begin, end in _THINKING:
        if prompt.rfind(begin) > prompt.rfind(end):
            return f"\n{end}\n\n"
    return ""


def common_length(left: str, right: str) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


def _common(left: str, right: str) -> int:
    """Length of what both begin with, never with half a marker."""
    length = common_length(left, right)
    if length == len(left) or length == len(right):
        return length
    begin = max(left.rfind(mark, 0, length) for mark in "<[")
    return begin if begin >= 0 and not re.search(r"[>\]\s]", left[begin:length]) else length


@dataclass(frozen=True)
class _Found:
    """A call in a rendered text: [begin, end), and its parts."""

    begin: int
    end: int
    between: str = ""
    name_key: str = ""
    arguments_key: str = ""
    in_list: bool = False


class _Reading:
    """What the probes' renderings say."""

    def __init__(self, prompt: str, answer: str, ends: Collection[str]) -> None:
        content = answer.rfind("probe_content")
        self._header = answer[:content] if content >= 0 else prompt
        self._after = answer[content + len("probe_content") :] if content >= 0 else ""
        self._ends = ends

    def format_of(self, one: str, other: str, two: str) -> ToolFormat | None:
        head = _common(one, self._header)
        call = _json_call(one, head, 0)
        if call is None:
            return self._tagged(one, other, two, head)
        opening = _after_thinking(one[head : call.begin])
        closing = self._closing(one[call.end :])
        if call.in_list:
            opening = opening.rpartition("[")[0]
            closing = closing.lstrip().removeprefix("]")
        if call.between.rstrip().endswith(("{", "(", '"', "'")) or _named(opening + closing):
            return None
        if any(end in opening for end in self._ends if end):
            return None  # the model would end before it
        shape: Literal["object", "list", "named"] = "named"
        if call.name_key:
            shape = "list" if call.in_list else "object"
        return ToolFormat(
            shape,
            opening,
            again=_again(two, head),
            closing=closing,
            between=call.between,
            name_key=call.name_key,
            arguments_key=call.arguments_key,
        )

    def _closing(self, rest: str) -> str:
        places = [place for end in self._ends if end and (place := rest.find(end)) >= 0]
        if places:
            return rest[: min(places)]
        return rest.removesuffix(self._after) if self._after else rest

    def _tagged(self, one: str, other: str, two: str, head: int) -> ToolFormat | None:
        whole = re.fullmatch(
            r"(.*?)other_tool(.*?)other_key(.*?)other_value(.*?)second_key(.*?)77(.*)",
            other[head:],
            re.DOTALL,
        )
        if whole is None or one[:head] != other[:head] or other.count("other_key", head) != 1:
            return None
        opening, to_key, to_text, to_next, to_json, rest = whole.groups()
        opening = _after_thinking(opening)
        end = self._closing(rest)
        after = _common(to_next, end)
        before_key = to_next[after:]
        # Without a sign of where a value ends and a parameter begins there is nothing to go by.
        if not before_key.strip() or not to_next[:after].strip() or not to_text.strip():
            return None
        if not to_key.endswith(before_key) or _named(opening + to_key + end):
            return None
        following = re.search(r"probe_value(.*?)other_tool", two[head:], re.DOTALL)
        return ToolFormat(
            "tagged",
            opening,
            again=following.group(1).removeprefix(to_next[:after]) if following else "",
            closing=end[after:],
            between=to_key.removesuffix(before_key),
            tags=Tags(before_key, to_text, to_json, to_next[:after]),
        )


def _named(text: str) -> bool:
    return any(name in text for name in _NAMES)


def _after_thinking(opening: str) -> str:
    for _, end in _THINKING:
        before, found, after = opening.rpartition(end)
        opening = after if found else before + after
    return opening


def _json_call(text: str, start: int, number: int) -> _Found | None:
    """The call of probe `number` in `text`, from `start` on."""
    name, arguments = _NAMES[number], _ARGUMENTS[number]
    decoder = json.JSONDecoder()
    for place in (match.start() for match in re.finditer(r"\{", text[start:])):
        begin = start + place
        try:
            value, end = decoder.raw_decode(text, begin)
        except ValueError:
            continue
        if value == arguments:
            before = text.rfind(name, start, begin)
            if before < 0 or '"' in text[before + len(name) : begin]:
                return None
            return _Found(before, end, between=text[before + len(name) : begin])
        keys = {json.dumps(value[key]): key for key in value}
        name_key = keys.get(json.dumps(name))
        arguments_key = keys.get(json.dumps(arguments))
        if name_key is not None and arguments_key is not None:
            in_list = text[start:begin].rstrip().endswith("[")
            return _Found(begin, end, "", name_key, arguments_key, in_list)
    return None


def _again(two: str, head: int) -> str:
    first = _json_call(two, head, 0)
    if first is None:
        return ""
    second = _json_call(two, first.end, 1)
    return "" if second is None else two[first.end : second.begin].replace("probe0002", _CALL_ID)
