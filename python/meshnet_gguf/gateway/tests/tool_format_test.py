"""What is found of tools in the templates that models ship: what they write is read back."""

import asyncio
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from meshnet_gguf.chat import ChatMessage, render_chat
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway._tool_format import ToolFormat, find_format
from meshnet_gguf.gateway._tool_parser import CallArguments, CallBegun, Content, ToolParser

TEMPLATES = {path.stem: path for path in map(pathlib.Path, os.environ["CHAT_TEMPLATES"].split())}
# Of the models' tokens, those that end a generation, as far as a template writes them.
ENDS = [
    *("</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<seed:eos>", "<|end|>"),
    *("<end_of_sentence>", "<SPECIAL_12>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *(
        "<|role_end|>",
        "<sep>",
        "<|end_of_text|>",
        "</assistant>",
        "<\uff5chy_eos:opensource\uff5c>",
    ),
    *("<|end_of_msg|>", "<|END_OF_TURN_TOKEN|>", "<|message_sep|>"),
]
# Templates that write calls in no form that is read here (in Python's own notation, keys
# without quotes, names as keys or twice, after the end of a turn) or none: served the generic way.
GENERIC = {
    "Apertus-8B-Instruct",
    "GigaChat3-10B-A1.8B",
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "LFM2-8B-A1B",
    "LFM2.5-8B-A1B",
    "LFM2.5-Instruct",
    "MiniMax-M3",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "google-gemma-4-31B-it-interleaved",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
    "muse-glimmer",
}
# How some families write them: shape, mark, keys of an object.
KNOWN = {
    "Qwen-Qwen2.5-7B-Instruct": ("object", "<tool_call>", "name", "arguments"),
    "Qwen-Qwen3-0.6B": ("object", "<tool_call>", "name", "arguments"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("object", "<tool_call>", "name", "arguments"),
    "meta-llama-Llama-3.3-70B-Instruct": ("object", "", "name", "parameters"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("list", "[TOOL_CALLS]", "name", "arguments"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        *("list", "<|START_ACTION|>", "tool_name", "parameters"),
    ),
    "Mistral-Small-3.2-24B-Instruct-2506": ("named", "[TOOL_CALLS]", "", ""),
    "meetkai-functionary-medium-v3.1": ("named", "<function=", "", ""),
    "deepseek-ai-DeepSeek-V3.1": (
        "named",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>",
        *("", ""),
    ),
    "upstage-Solar-Open-100B": ("named", "<|tool_calls|><|tool_call:begin|>", "", ""),
    "deepseek-ai-DeepSeek-V4": (
        "tagged",
        '<\uff5cDSML\uff5ctool_calls>\n<\uff5cDSML\uff5cinvoke name="',
        *("name", "arguments"),
    ),
    "Qwen3-Coder": ("tagged", "<tool_call>\n<function=", "name", "arguments"),
    "GLM-4.6": ("tagged", "<tool_call>", "name", "arguments"),
}
# Templates that write one call a turn, or refuse more.
ONE_CALL = {
    "GigaChat3.1-10B-A1.8B",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "openai-gpt-oss-120b",
}


def tool(name: str, keys: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": "x"} for key, kind in keys.items()}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    function = {"name": name, "description": "x", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", {"city": "string", "days": "integer"}),
    tool("now", {"zone": "string"}),
]
SCHEMAS = {item["function"]["name"]: item["function"]["parameters"] for item in TOOLS}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'K\u00f6ln "am" {Rhein}', "days": 2}),
    ("now", {"zone": "UTC\n+1"}),
]


def written(
    template: str, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], begin: bool
) -> str:
    return render_chat(
        template,
        messages,
        tools=tools or None,
        add_generation_prompt=begin,
        bos_token="<s>",
        eos_token="</s>",
    )


def form_of(template: str) -> ToolFormat:
    async def render(
        messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], begin: bool
    ) -> str:
        return written(template, messages, tools, begin)

    return asyncio.run(find_format(render, ends=ENDS))


def answer_of(template: str, form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """What a model says to make these calls, as its own template writes them."""
    turn = [
        {
            "id": f"abcdefgh{number}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(value) if form.arguments_as_text else value,
            },
        }
        for number, (name, value) in enumerate(calls)
    ]
    user = ChatMessage("user", "Hi")
    prompt = written(template, [user], TOOLS, True)
    whole = written(
        template, [user, ChatMessage("assistant", "", {"tool_calls": turn})], TOOLS, False
    )
    common = len(os.path.commonprefix([prompt, whole]))  # noqa: RUF071 - texts, no paths
    name = whole.index(calls[0][0], common)
    text = whole[whole.rindex(form.trigger, 0, name) if form.trigger else common :]
    for end in ENDS:
        text = text.split(end)[0]
    return text


def read(form: ToolFormat, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(form, SCHEMAS)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    names = [event.name for event in events if isinstance(event, CallBegun)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    return content.strip(), list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_a_template_writes_is_read_back(name: str) -> None:
    template = TEMPLATES[name].read_text("utf-8")
    form = form_of(template)
    assert form.writes_calls == (name not in GENERIC)
    if name in KNOWN:
        assert (form.shape, form.trigger, form.name_key, form.arguments_key) == KNOWN[name]
    if not form.writes_calls:
        return
    for calls in (CALLS[:1], CALLS[1:], CALLS):
        if len(calls) > 1 and name in ONE_CALL:
            continue
        text = answer_of(template, form, calls)
        content, found = read(form, [text])
        assert content == ""
        assert [(called, json.loads(arguments)) for called, arguments in found] == calls
        assert read(form, list(text)) == (content, found)


def test_the_lists_name_templates_that_are_there() -> None:
    assert GENERIC | set(KNOWN) | ONE_CALL <= set(TEMPLATES)
    assert len(TEMPLATES) - len(GENERIC) >= 50


def test_a_thought_that_the_prompt_begins_is_left_before_a_forced_call() -> None:
    form = form_of(TEMPLATES["Qwen3.5-4B"].read_text("utf-8"))
    assert form.leave_thinking == "\n</think>\n\n"
    assert form_of(TEMPLATES["Qwen-Qwen2.5-7B-Instruct"].read_text("utf-8")).leave_thinking == ""


def test_a_template_that_refuses_a_system_says_so() -> None:
    assert not form_of(TEMPLATES["google-gemma-2-2b-it"].read_text("utf-8")).system_role
    with pytest.raises(MeshnetError):
        written(
            TEMPLATES["google-gemma-2-2b-it"].read_text("utf-8"),
            [ChatMessage("system", "x"), ChatMessage("user", "y")],
            [],
            True,
        )
