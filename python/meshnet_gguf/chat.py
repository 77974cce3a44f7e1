"""Chat templates: Jinja2 source that comes with a model, rendered in a sandbox.

A template is part of an artifact that somebody else made, so it is untrusted code. It runs in
Jinja2's immutable sandbox: no attribute whose name starts with an underscore, no change of the
values it is given, no file, no import, loops over at most 100,000 numbers, output of at most
`MAX_RENDERED_BYTES`.

    prompt = render_chat(vocabulary.chat_template, [ChatMessage("user", "Hello")])

What templates in the field expect is there: `messages`, `add_generation_prompt`, `bos_token`,
`eos_token`, `tools`, `raise_exception`, `strftime_now`, `tojson`, `{% break %}` and
`{% continue %}`, `{% generation %}` blocks, and blocks trimmed as in `trim_blocks` and
`lstrip_blocks`.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from meshnet_gguf.errors import MeshnetError
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["MAX_RENDERED_BYTES", "ChatMessage", "render_chat"]

# What the worker's tokenizer accepts.
MAX_RENDERED_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class ChatMessage:
    """One turn. `extra` holds what only some templates read: name, tool_calls, tool_call_id."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_template_value(self) -> dict[str, Any]:
        """What the template sees as one element of `messages`."""
        return {**self.extra, "role": self.role, "content": self.content}


class _RefusedError(Exception):
    """What a template says through raise_exception."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` blocks mark a model's own words in training; they change nothing here."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> str:
    raise _RefusedError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes <, > and & for HTML, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja2's immutable sandbox that also refuses to multiply a short template into gigabytes."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("the operator ** is not allowed")
        for many, times in ((left, right), (right, left)):
            if not isinstance(times, int) or not hasattr(many, "__len__"):
                continue
            if len(many) * times > MAX_RENDERED_BYTES:
                raise jinja2.exceptions.SecurityError("a product is too long")
        return super().call_binop(context, operator, left, right)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.LoopControlExtension, _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _invalid(what: str) -> MeshnetError:
    return MeshnetError(
        errors_pb2.REASON_ARTIFACT_INVALID,
        f"the model's chat template {what}; give a prompt instead of messages, or another artifact",
    )


def render_chat(
    template: str,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: Callable[[], datetime.datetime] = datetime.datetime.now,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for `messages`. `variables` are handed to the template as further names.

    Raises MeshnetError: FEATURE_UNSUPPORTED when the model has no template or its template refuses
    these messages (raise_exception), ARTIFACT_INVALID when the template is no valid Jinja2, fails,
    reaches for something that the sandbox forbids, or writes more than MAX_RENDERED_BYTES.
    """
    if not template:
        raise MeshnetError(
            errors_pb2.REASON_FEATURE_UNSUPPORTED,
            "expected a chat template in the artifact's metadata, found none; "
            "give a prompt instead of messages",
        )

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    values: dict[str, Any] = {
        "messages": [message.as_template_value() for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": [dict(tool) for tool in tools] if tools else None,
        "strftime_now": strftime_now,
        **(variables or {}),
    }
    try:
        parts: list[str] = []
        size = 0
        for part in _compile(template).generate(values):
            size += len(part.encode("utf-8", "surrogatepass"))
            if size > MAX_RENDERED_BYTES:
                raise _invalid(f"wrote more than {MAX_RENDERED_BYTES} bytes")
            parts.append(part)
        return "".join(parts)
    except _RefusedError as error:
        raise MeshnetError(
            errors_pb2.REASON_FEATURE_UNSUPPORTED,
            f"the model's chat template refuses these messages: {error}; "
            "send messages that the model supports",
        ) from error
    except jinja2.exceptions.SecurityError as error:
        raise _invalid(f"reached for something that the sandbox forbids ({error})") from error
    except jinja2.TemplateSyntaxError as error:
        raise _invalid(f"is no valid Jinja2 at line {error.lineno} ({error.message})") from error
    except MeshnetError:
        raise
    except Exception as error:  # a template may raise whatever its expressions raise
        raise _invalid(f"failed ({type(error).__name__}: {error})") from error
