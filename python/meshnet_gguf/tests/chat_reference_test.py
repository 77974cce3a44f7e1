"""Templates that models ship, rendered by us and by llama.cpp's own engine: the same text."""

import datetime
import json
import os
import pathlib
import subprocess
from typing import Any

import pytest
from meshnet_gguf.chat import ChatMessage, render_chat
from meshnet_gguf.errors import MeshnetError

NOW = datetime.datetime(2026, 2, 3, 12, 0, tzinfo=datetime.UTC)
TEMPLATES = {path.stem: path for path in map(pathlib.Path, os.environ["CHAT_TEMPLATES"].split())}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & later",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city, \u00e4 or not"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "K\u00f6ln", "days": 2}},
}
USER = ChatMessage("user", "  What is <b>gravity</b> & why? \u00e4\U0001f600\n")
CONVERSATIONS: dict[str, tuple[list[ChatMessage], list[dict[str, Any]] | None]] = {
    "one turn": ([USER], None),
    "turns": ([USER, ChatMessage("assistant", "It pulls."), ChatMessage("user", "Why?")], None),
    "system": ([ChatMessage("system", "Be short."), USER], None),
    "tools": ([ChatMessage("system", "Be short."), USER], [TOOL]),
    "tool call": (
        [
            USER,
            ChatMessage("assistant", "", {"tool_calls": [CALL]}),
            ChatMessage(
                "tool", '{"sun": true}', {"tool_call_id": "call00001", "name": "get_weather"}
            ),
        ],
        [TOOL],
    ),
}


def ours(template: str, name: str) -> str | None:
    """Our rendering; None where the template refuses."""
    messages, tools = CONVERSATIONS[name]
    try:
        return render_chat(
            template,
            messages,
            bos_token="<s>",
            eos_token="</s>",
            tools=tools,
            now=lambda: NOW,
        )
    except MeshnetError:
        return None


class Reference:
    """llama.cpp's engine in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [os.environ["JINJA_RENDER"], str(int(NOW.timestamp()))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TZ": "UTC"},
        )

    def render(self, template: str, name: str) -> str | None:
        messages, tools = CONVERSATIONS[name]
        values: dict[str, Any] = {
            "messages": [message.as_template_value() for message in messages],
            "add_generation_prompt": True,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "tools": tools,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"template": template, "values": values}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, str] = json.loads(self._process.stdout.readline())
        return answer.get("text")

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def reference() -> Any:
    engine = Reference()
    yield engine
    engine.close()


# Templates that want more than Jinja2's sandbox and Transformers' own names give: they change lists
# in place, use names that nobody defines, or print what only llama.cpp's engine forgives. We refuse
# there or, once, escape as Jinja2 does.
OTHERWISE = {
    "Kimi-K2-Instruct": {"tool call"},
    "Kimi-K2-Thinking": {"tool call"},
    "fireworks-ai-llama-3-firefunction-v2": set(CONVERSATIONS),
    "llama-cpp-deepseek-r1": {"tools", "tool call"},
    "meetkai-functionary-medium-v3.1": {"tools", "tool call"},
    "meetkai-functionary-medium-v3.2": {"tool call"},
}
# What both refuse: a system role that its author does not want, a template for tools without any.
_WITHOUT_TOOLS = {"one turn", "turns", "system"}
REFUSING = {
    "CohereForAI-c4ai-command-r-plus-tool_use": _WITHOUT_TOOLS,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": _WITHOUT_TOOLS,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": _WITHOUT_TOOLS,
    "google-gemma-2-2b-it": {"system", "tools", "tool call"},
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_renders_as_upstream_renders_it(name: str, reference: Reference) -> None:
    template = TEMPLATES[name].read_text("utf-8")
    for conversation in CONVERSATIONS:
        expected, found = reference.render(template, conversation), ours(template, conversation)
        if conversation in OTHERWISE.get(name, ()):
            assert found != expected, "no longer otherwise: take it off the list"
        elif conversation in REFUSING.get(name, ()):
            assert (found, expected) == (None, None)
        else:
            assert found is not None
            assert found == expected


def test_upstreams_templates_are_there() -> None:
    assert len(TEMPLATES) >= 70
    assert set(OTHERWISE) | set(REFUSING) <= set(TEMPLATES)
