"""A model's text, read as content and calls of tools while it comes.

    parser = ToolParser(tool_format, {"get_weather": schema})
    for event in parser.push('<tool_call>{"name": "get_weather", "argum'): ...
    for event in parser.finish(): ...

However the text is cut into pieces, the events say the same. What may become a call is held back
until it is certain, and what turns out to be none is content, unchanged. Arguments are passed on as
the model writes them; they are JSON where the model has written JSON.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshnet_gguf.gateway._tool_format import ToolFormat, common_length, new_call_id, pattern_of

__all__ = ["CallArguments", "CallBegun", "Content", "ToolEvent", "ToolParser"]

_NAME = r"([\w.-]{1,64})"
# What stands between the mark of a call and its arguments is never longer.
_MAX_BEFORE_ARGUMENTS = 512


@dataclass(frozen=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of a tool that the request has named."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments."""

    index: int
    text: str


ToolEvent = Content | CallBegun | CallArguments


class _State(enum.Enum):
    CONTENT = enum.auto()
    OPENED = enum.auto()  # after the mark of a call
    OBJECT = enum.auto()  # in an object with name and arguments
    ARGUMENTS = enum.auto()  # in the arguments of a named call
    TAGS = enum.auto()  # between the parameters of a tagged call
    KEY = enum.auto()
    VALUE = enum.auto()
    LISTED = enum.auto()  # after a call in a list
    AFTER = enum.auto()


class ToolParser:
    """Reads one answer. `schemas` holds the parameters of every tool that may be called.

    After `limit` calls (0: any number) it is `done`, and what follows is not read. Where a call of
    a tool in `pause_at` begins it is `paused` before the call's arguments: `body_start` is then the
    place, in characters since the parser was made or resumed, at which the call itself begins.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        limit: int = 0,
        pause_at: Container[str] = (),
    ) -> None:
        self.calls = 0
        self.paused = False
        self.body_start = 0
        self._form = tool_format
        self._schemas = schemas
        self._limit = limit
        self._pause_at = pause_at
        self._trigger = tool_format.trigger
        self._state = _State.CONTENT
        self._text = ""  # what has come and is not taken yet
        self._taken = 0  # characters taken
        self._undo = ""  # what was taken since the mark, while it may still be content
        self._events: list[ToolEvent] = []
        # A call without a mark can only stand at the beginning.
        self._at_start = True
        self._after_call = False
        self._listed = False
        self._scan = _JsonScan()
        self._name = ""
        self._key = ""
        self._value_is_text = False
        self._parameters = 0

    @property
    def last_name(self) -> str:
        """The tool of the last call."""
        return self._name

    @property
    def done(self) -> bool:
        """Whether as many calls have come as there may be."""
        return bool(self._limit) and self.calls >= self._limit and self._state is _State.AFTER

    def push(self, text: str) -> list[ToolEvent]:
        """What a further piece of text says."""
        self._text += text
        while not (self.paused or self.done) and self._step():
            pass
        return self._given()

    def finish(self) -> list[ToolEvent]:
        """What is left when no more text comes."""
        if self.paused or self.done:
            return []
        if self._state in (_State.CONTENT, _State.OPENED):
            self._content(self._undo + self._text)
        elif self._state is _State.OBJECT and not self._scan.committed:
            self._content(self._undo + self._scan.text + self._text)
        elif self._state is _State.OBJECT:
            self._arguments(self._scan.finish())
        elif self._state is _State.TAGS and self._text.strip() and self._is_end(self._text):
            self._arguments("}" if self._parameters else "{}")
        elif self._state is _State.AFTER and not self._is_end(self._text):
            self._content(self._text.strip())
        self._text = self._undo = ""
        return self._given()

    def resume(self) -> None:
        """Goes on after a call that somebody else has read to its end, in a new text."""
        self.paused = False
        self._text, self._taken = "", 0
        self._end_call()

    def _given(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _content(self, text: str) -> None:
        if text:
            self._at_start = False
            last = self._events[-1] if self._events else None
            if isinstance(last, Content):
                self._events.pop()
                text = last.text + text
            self._events.append(Content(text))

    def _arguments(self, text: str) -> None:
        if text:
            last = self._events[-1] if self._events else None
            if isinstance(last, CallArguments):
                self._events.pop()
                text = last.text + text
            self._events.append(CallArguments(self.calls - 1, text))

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self._taken += count
        return taken

    def _skip_space(self) -> None:
        self._undo += self._take(len(self._text) - len(self._text.lstrip()))

    def _step(self) -> bool:
        """Takes what it can; False when more text is needed."""
        return {
            _State.CONTENT: self._in_content,
            _State.OPENED: self._opened,
            _State.OBJECT: self._in_object,
            _State.ARGUMENTS: self._in_arguments,
            _State.TAGS: self._in_tags,
            _State.KEY: self._in_key,
            _State.VALUE: self._in_value,
            _State.LISTED: self._in_list,
            _State.AFTER: self._after,
        }[self._state]()

    # Content, and where a call begins.

    def _in_content(self) -> bool:
        if not self._trigger:
            return self._in_unmarked_content()
        if self._after_call:
            self._skip_space()
            self._undo = ""
            self._after_call = not self._text
        place = self._text.find(self._trigger)
        if place < 0:
            # Held back: half a mark, and the white space before it, which belongs to the call.
            shown = self._text[: len(self._text) - _beginning(self._text, self._trigger)].rstrip()
            self._content(self._take(len(shown)))
            return False
        shown = self._text[:place].rstrip()
        self._content(self._take(len(shown)))
        self._undo = self._take(place - len(shown) + len(self._trigger))
        self._state = _State.OPENED
        return True

    def _in_unmarked_content(self) -> bool:
        body = self._text.lstrip()
        if not body:
            return False
        if self._at_start and (self._form.shape == "named" or body[0] == "{"):
            self._state = _State.OPENED
            return True
        self._content(self._take(len(self._text)))
        return False

    def _no_call(self, seen: str = "") -> bool:
        # The mark is passed on at once, so that it is not found again.
        self._content(self._undo + seen)
        self._undo = ""
        self._at_start = False
        self._state = _State.CONTENT
        return True

    def _opened(self) -> bool:
        self._skip_space()
        if not self._text:
            return False
        if self._form.shape == "named":
            return self._named()
        if self._form.shape == "tagged":
            return self._tagged()
        if self._text[0] == "[" and not self._listed and self._form.shape == "list":
            self._listed = True
            self._undo += self._take(1)
            return True
        if self._text[0] != "{":
            self._listed = False
            return self._no_call()
        self.body_start = self._taken
        self._scan = _JsonScan(self._form.name_key or "name", self._form.arguments_key)
        self._state = _State.OBJECT
        return True

    def _begin_call(self, name: str) -> bool:
        if name not in self._schemas:
            return False
        self._name = name
        self._undo = ""
        self._at_start = False
        self._events.append(CallBegun(self.calls, new_call_id(), name))
        self.calls += 1
        self.paused = name in self._pause_at
        return True

    def _end_call(self) -> None:
        self._undo = ""
        self._after_call = True
        self._state = _State.LISTED if self._listed else _State.AFTER

    # Objects.

    def _in_object(self) -> bool:
        scan = self._scan
        while self._text:
            taken = scan.push(self._text)
            self._take(taken)
            if scan.name and not scan.committed:
                scan.committed = self._begin_call(scan.name)
                if not scan.committed:
                    return self._not_this_object()
                if self.paused:
                    return False
            if scan.committed:
                self._arguments(scan.arguments())
            if scan.ended:
                if not scan.committed:
                    return self._not_this_object()
                self._arguments(scan.finish())
                self._end_call()
                return True
            if scan.foreign and not scan.committed:
                return self._not_this_object()
        return False

    def _not_this_object(self) -> bool:
        self._listed = False
        return self._no_call(self._scan.text)

    # Named calls.

    def _named(self) -> bool:
        form = self._form
        begun = re.match(rf"\s*{form.before_name}{_NAME}[^\w.-]", self._text)
        if begun is not None and begun.group(1) not in self._schemas:
            return self._no_call()
        place = self._text.find("{")
        if place < 0:
            return self._no_call() if len(self._text) > _MAX_BEFORE_ARGUMENTS else False
        before = rf"\s*{form.before_name}{_NAME}{pattern_of(form.between)}\s*"
        whole = re.fullmatch(before, self._text[:place])
        if whole is None or whole.group(1) not in self._schemas:
            return self._no_call()
        self.body_start = self._taken
        self._take(place)
        self._begin_call(whole.group(1))
        self._scan = _JsonScan()
        self._state = _State.ARGUMENTS
        return True

    def _in_arguments(self) -> bool:
        if not self._text:
            return False
        self._arguments(self._take(self._scan.push(self._text)))
        if self._scan.ended:
            self._end_call()
            return True
        return False

    # Tagged calls.

    def _tagged(self) -> bool:
        begun = re.match(rf"{_NAME}(?=[^\w.-])", self._text)
        if begun is None:
            if re.fullmatch(r"[\w.-]{1,64}", self._text):
                return False
            return self._no_call()
        if begun.group(1) not in self._schemas:
            return self._no_call()
        between = pattern_of(self._form.between.strip())
        rest = self._text[begun.end() :]
        after = re.match(rf"\s*{between}", rest)
        if after is None:
            if len(rest) > _MAX_BEFORE_ARGUMENTS or not self._form.between.strip():
                return self._no_call()
            return False
        self.body_start = self._taken
        self._take(begun.end() + after.end())
        self._begin_call(begun.group(1))
        self._parameters = 0
        self._state = _State.TAGS
        return True

    def _in_tags(self) -> bool:
        tags = self._form.tags
        assert tags is not None
        ends = [text for text in (self._form.further, self._form.closing) if text.strip()]
        found, length, wait = _match(self._text, [tags.before_key, *ends])
        if wait:
            return False
        if found == tags.before_key:
            self._take(length)
            self._state = _State.KEY
            return True
        self._arguments("}" if self._parameters else "{}")
        self._end_call()
        return True

    def _in_key(self) -> bool:
        tags = self._form.tags
        assert tags is not None
        pattern, text_word = _value_mark(tags.before_text, tags.before_json)
        found = re.search(pattern, self._text)
        if found is None:
            return False
        self._key = self._text[: found.start()].strip()
        self._value_is_text = text_word is not None and found.group(1) == text_word
        if text_word is None:
            self._value_is_text = self._is_text(self._key)
        self._take(found.end())
        self._state = _State.VALUE
        return True

    def _in_value(self) -> bool:
        tags = self._form.tags
        assert tags is not None
        place = self._text.find(tags.after_value.strip())
        if place < 0:
            return False
        value = self._take(place)
        self._take(len(tags.after_value.strip()))
        value = value.removeprefix(_space_after(tags.before_text))
        value = value.removesuffix(_space_before(tags.after_value))
        if value.startswith("<![CDATA[") and value.endswith("]]>"):
            value = value[len("<![CDATA[") : -len("]]>")]
        before = ", " if self._parameters else "{"
        written = json.dumps(value, ensure_ascii=False)
        if not self._value_is_text:
            with contextlib.suppress(ValueError, RecursionError):
                written = json.dumps(json.loads(value), ensure_ascii=False)
        self._parameters += 1
        self._arguments(f"{before}{json.dumps(self._key, ensure_ascii=False)}: {written}")
        self._state = _State.TAGS
        return True

    def _is_text(self, key: str) -> bool:
        properties = self._schemas[self._name].get("properties")
        declared = properties.get(key) if isinstance(properties, Mapping) else None
        return isinstance(declared, Mapping) and declared.get("type") == "string"

    # What follows a call.

    def _in_list(self) -> bool:
        self._skip_space()
        self._undo = ""
        if not self._text:
            return False
        if self._text[0] == ",":
            self._take(1)
            self._state = _State.OPENED
            return True
        if self._text[0] == "]":
            self._take(1)
        self._listed = False
        self._state = _State.AFTER
        return True

    def _after(self) -> bool:
        form = self._form
        further = form.further if form.shape != "list" else ""
        ends = [text for text in (further, form.closing) if text.strip()]
        found, length, wait = _match(self._text, ends)
        if wait:
            return False
        if found:
            taken = self._take(length)
            if found == further:
                # Its mark is in it: what is no call after all is shown with it.
                self._undo = taken[-len(self._trigger) :] if self._trigger else taken
                self._state = _State.OPENED
                return True
        elif form.shape == "object" and form.again.isspace():
            body = self._text.lstrip()
            if not body:
                return False
            if body[0] == "{":
                self._state = _State.OPENED
                return True
        self._state = _State.CONTENT
        return True

    def _is_end(self, text: str) -> bool:
        squeezed = _squeezed(text)
        return any(
            _squeezed(end).startswith(squeezed) for end in (self._form.closing, self._form.again)
        )


class _JsonScan:
    """An object's text, character by character, without reading it as JSON.

    With keys it looks for the values of two of them at the top: the name as soon as it is there,
    the arguments as they come. `foreign` when the first key is none that calls have.
    """

    _KNOWN = frozenset({"id", "type", "tool_call_id"})

    def __init__(self, name_key: str = "", arguments_key: str = "") -> None:
        self.text = ""
        self.name = ""
        self.ended = False
        self.foreign = False
        self.committed = False
        self._name_key = name_key
        self._arguments_key = arguments_key
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string_start = 0
        self._last_string = ""
        self._key: str | None = None
        self._value_start = 0
        self._arguments: list[int] = []  # where they begin and, once known, end
        self._given = 0

    def push(self, text: str) -> int:
        """Reads on to the end of the object, or of the name. How many characters it took."""
        for number, letter in enumerate(text):
            self.text += letter
            self._letter(letter)
            if self.ended or self.foreign:
                return number + 1
            if self.name and not self.committed:
                return number + 1
        return len(text)

    def _letter(self, letter: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
                if self._depth == 1:
                    self._last_string = self.text[self._string_start :]
            return
        if letter == '"':
            self._in_string = True
            self._string_start = len(self.text) - 1
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._value_ends()
                self.ended = True
        elif self._depth == 1 and letter == ":" and self._key is None:
            self._key_is(_string(self._last_string))
        elif self._depth == 1 and letter == ",":
            self._value_ends()

    def _key_is(self, key: str) -> None:
        self._key = key
        self._value_start = len(self.text)
        if key == self._arguments_key and not self._arguments:
            self._arguments = [self._value_start]
        known = key in self._KNOWN or key in (self._name_key, self._arguments_key)
        self.foreign = bool(self._name_key) and not known and not self.name

    def _value_ends(self) -> None:
        end = len(self.text) - 1
        if self._key == self._name_key and not self.name:
            self.name = _string(self.text[self._value_start : end].strip())
        elif self._key == self._arguments_key and len(self._arguments) == 1:
            self._arguments.append(end)
        self._key = None

    def arguments(self) -> str:
        """What has come of the arguments since the last call."""
        if not self._arguments:
            return ""
        begin, end = self._arguments[0], (self._arguments[1:] or [len(self.text)])[0]
        value = self.text[begin:end].strip()
        if value[:1] == '"' and not self.ended:
            return ""  # JSON in a string: read when it is whole
        if value[:1] == '"':
            value = _string(value)
        if not self.ended and len(self._arguments) == 1:
            # White space at the end may be what follows the arguments.
            value = self.text[begin:end].lstrip().rstrip()
        given, self._given = self._given, max(self._given, len(value))
        return value[given:]

    def finish(self) -> str:
        """The rest of the arguments; {} when there were none."""
        rest = self.arguments()
        return rest if self._given or not self.ended else "{}"


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which `mark` begins."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _match(text: str, candidates: Sequence[str]) -> tuple[str, int, bool]:
    """Which candidate `text` begins with, white space aside, and its length there.

    The last is True when more text may decide otherwise.
    """
    best, length = "", 0
    wait = False
    for candidate in candidates:
        wanted = _squeezed(candidate)
        place = 0
        for number, letter in enumerate(text):
            if letter.isspace():
                continue
            if letter != wanted[place]:
                break
            place += 1
            if place == len(wanted):
                if number + 1 > length:
                    best, length = candidate, number + 1
                break
        else:
            wait = True
    return best, length, wait


def _value_mark(text: str, other: str) -> tuple[str, str | None]:
    """What stands before a value, as a pattern, and the word in it that means text."""
    text, other = text.strip(), other.strip()
    if text == other:
        return f"{pattern_of(text)}()", None
    begin = common_length(text, other)
    end = common_length(text[begin:][::-1], other[begin:][::-1])
    word = text[begin : len(text) - end]
    mark = rf"{re.escape(text[:begin])}([\w.-]*?){re.escape(text[len(text) - end :])}"
    return mark, word


def _space_after(text: str) -> str:
    return text[len(text.rstrip()) :]


def _space_before(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]
