"""What clients may ask for: OpenAI's request bodies, checked before anything is done with them.

A field that OpenAI's API knows and that changes nothing here (`user`, `metadata`, ...) is taken
and ignored. One that would change the answer and that is not supported is FEATURE_UNSUPPORTED
unless it is null, one that nobody knows is UNKNOWN_FIELD; anything else that is wrong is
FIELD_OUT_OF_BOUNDS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from meshnet_gguf.gateway._failures import RequestError
from proto.meshnet.shard.v1 import errors_pb2

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "Message",
    "ResponseFormat",
    "SamplingRequest",
    "Tool",
    "ToolChoice",
    "parse",
    "schema_text",
]

_MAX_MESSAGES = 2048
_MAX_CHOICES = 16
_MAX_STOPS = 16
_MAX_BIASES = 1024
_MAX_TOOLS = 128
_MAX_SEED = 2**32
_MAX_DEPTH = 128
# What a worker takes.
_MAX_SCHEMA_BYTES = 65536
# Nobody's mistake has more; to look at them all would take a second.
_MAX_FAULTS = 10_000
# Of a name that the client made up, as much as tells which it is.
_SHOWN_NAME = 64

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
ShortText = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses what is nested so deep that whoever works on it would run out of stack."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return value
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"expected at most {_MAX_DEPTH} levels of objects and lists in each other")


def _shallow_object(text: str) -> str:
    """The same of the object that a text may hold; other texts are what they are."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return text
    if isinstance(value, dict):
        _shallow(value)
    return text


Schema = Annotated[dict[str, Any], AfterValidator(_shallow)]
# Of OpenAI's API, but not served here: only null is taken, which clients send that leave nothing
# out.
Unsupported: TypeAlias = None
# What clients send along and nobody here reads; it may be nested as deep as it likes.
Ignored = Annotated[Any, Field(exclude=True)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """A call that the model made in an earlier turn; `arguments` is a JSON object as text."""

    name: Name
    arguments: Annotated[str, AfterValidator(_shallow_object)]
    # OpenAI's client keeps what it made of an answer in the answer, and sends it back.
    parsed_arguments: Ignored = None


class ToolCall(_Body):
    """One call of an assistant's turn."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


class Message(_Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_TOOLS)] | None = None
    tool_call_id: ShortText | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    # An answer comes back with all that OpenAI's client knows of one.
    annotations: Ignored = None
    parsed: Ignored = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Function(_Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    """The function that must be called."""

    name: Name


class ToolChoice(_Body):
    """A choice by name."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(_Body):
    """The schema that an answer must have."""

    name: Name
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(_Body):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(_Body):
    """What both endpoints share."""

    # Where what is to be gone on with stands.
    prompt_field: ClassVar[str]

    model: ShortText
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=_MAX_BIASES
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def biases(self, vocabulary_size: int) -> dict[int, float]:
        """`logit_bias` by token id. Raises RequestError."""
        biases: dict[int, float] = {}
        for text, bias in (self.logit_bias or {}).items():
            usual = text.isascii() and text.isdecimal() and len(text) < 10
            if not usual or int(text) >= vocabulary_size:
                raise RequestError(
                    errors_pb2.REASON_TOKEN_OUT_OF_RANGE,
                    f"expected token ids in [0, {vocabulary_size}) as keys, got {text[:20]!r}",
                    "logit_bias",
                )
            biases[int(text)] = bias
        return biases

    def seed_of(self, choice: int, random_seed: int) -> int:
        """The seed of one choice; without `seed` it comes from `random_seed`."""
        first = random_seed if self.seed is None else self.seed
        return (first + choice) % _MAX_SEED


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    prompt_field = "messages"

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    modalities: list[Literal["text"]] | None = None
    # Makes answers come sooner elsewhere; they are the same without it.
    prediction: Ignored = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    web_search_options: Unsupported = None

    @property
    def with_tools(self) -> bool:
        """Whether tools or their calls occur in it."""
        return bool(self.tools) or any(
            message.tool_calls or message.role == "tool" for message in self.messages
        )

    @property
    def length(self) -> int | None:
        """The longest answer in tokens; None for as long as the context allows."""
        return self.max_completion_tokens or self.max_tokens


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt_field = "prompt"

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MAX_CHOICES)]
    )
    max_tokens: TokenCount | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: TokenCount | None = None
    suffix: str | None = None

    @property
    def length(self) -> int | None:
        """The longest answer in tokens; None for as long as the context allows."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[Any] = list(self.prompt)
        return [several] if isinstance(several[0], int) else several


_Request = TypeVar("_Request", bound=BaseModel)


def parse(kind: type[_Request], body: bytes) -> _Request:
    """The request in a body.

    Raises RequestError: MALFORMED_MESSAGE for what is no JSON object, UNKNOWN_FIELD,
    FEATURE_UNSUPPORTED for what is not served here, such as pictures, FIELD_OUT_OF_BOUNDS.
    """
    try:
        # Of bytes, json.loads() would take halves of characters as well.
        value = json.loads(body.decode("utf-8-sig"))
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(
            errors_pb2.REASON_MALFORMED_MESSAGE, f"expected a JSON object ({error})"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(
            errors_pb2.REASON_MALFORMED_MESSAGE,
            f"expected a JSON object, got {type(value).__name__}",
        )
    try:
        # A number in quotes or a flag for a number is a mistake, not a number.
        return kind.model_validate(value, strict=True)
    except pydantic.ValidationError as error:
        if error.error_count() > _MAX_FAULTS:
            raise RequestError(
                errors_pb2.REASON_FIELD_OUT_OF_BOUNDS,
                f"expected a request of OpenAI's API, got one with {error.error_count()} faults",
            ) from error
        faults = error.errors(include_url=False, include_context=False)
        raise _refusal([_Fault.of(fault, value) for fault in faults]) from error


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """A schema as workers take it. Raises RequestError (GRAMMAR_INVALID) for one of a huge size."""
    text = json.dumps(schema, ensure_ascii=False)
    if (size := len(text.encode())) > _MAX_SCHEMA_BYTES:
        raise RequestError(
            errors_pb2.REASON_GRAMMAR_INVALID,
            f"expected a JSON schema of at most {_MAX_SCHEMA_BYTES} bytes, got {size}; shorten it",
            param,
        )
    return text


@dataclass(frozen=True)
class _Fault:
    """What is wrong in a body, and where: `place` are the names and numbers on the way to it."""

    kind: str
    place: tuple[str, ...]
    message: str
    value: object

    @classmethod
    def of(cls, details: Mapping[str, Any], body: object) -> Self:
        """What pydantic found in `body`."""
        place, value = [], body
        for part in details["loc"]:
            # Its places also name the alternative that did not fit; what the client wrote does not.
            if (isinstance(value, list) and isinstance(part, int)) or (
                isinstance(value, dict) and part in value
            ):
                value = value[part]
            elif details["type"] != "missing" or part != details["loc"][-1]:
                continue
            place.append(str(part)[:_SHOWN_NAME])
        return cls(details["type"], tuple(place), details["msg"], details["input"])

    @property
    def is_unsupported(self) -> bool:
        """Whether it is of OpenAI's API, but not served here."""
        of_a_kind = self.place[-1:] == ("type",) and isinstance(self.value, str)
        return self.kind == "none_required" or (self.kind == "literal_error" and of_a_kind)

    @property
    def closeness(self) -> tuple[bool, bool, int, bool]:
        """How well it says what to mend: of alternatives, the one that the client meant."""
        # First what no field that is left away would mend, then fields that nobody knows.
        unknown = self.kind == "extra_forbidden"
        of_another_type = self.kind.endswith("_type")
        return self.is_unsupported, unknown, len(self.place), not of_another_type


def _refusal(faults: Sequence[_Fault]) -> RequestError:
    fault = max(faults, key=lambda each: each.closeness)
    place, got = ".".join(fault.place), _shortened(fault.value)
    if fault.kind == "none_required":
        reason, said = errors_pb2.REASON_FEATURE_UNSUPPORTED, " is not served here; leave it away"
    elif fault.is_unsupported and "content" in fault.place:
        reason = errors_pb2.REASON_FEATURE_UNSUPPORTED
        said = f": expected text as content, got {got}; this server reads text only"
    elif fault.is_unsupported:
        reason = errors_pb2.REASON_FEATURE_UNSUPPORTED
        said = f": {fault.message}, got {got}; nothing else is served here"
    elif fault.kind == "extra_forbidden":
        reason = errors_pb2.REASON_UNKNOWN_FIELD
        said = " is no field that this server knows; leave it away"
    else:
        reason, said = errors_pb2.REASON_FIELD_OUT_OF_BOUNDS, f": {fault.message}, got {got}"
    return RequestError(reason, place + said, place)


def _shortened(value: object) -> str:
    # Never a whole prompt in an error: kinds and sizes of what is long.
    if isinstance(value, str) and len(value) > 40:
        return f"a text of {len(value)} characters"
    if isinstance(value, (list, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)[:60]
