"""`meshnet serve` on a real model, split into stages within the memory that is free here."""

import asyncio
import json
import os
import signal

import jsonschema
import openai
from openai.types.chat import ChatCompletionMessageParam

END = 120.0
MODEL = os.path.realpath(os.environ["MESHNET_TEST_MODEL"])


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}


async def call_a_tool(client: openai.AsyncOpenAI, model: str) -> None:
    """The model's template knows no tools: they are served the generic way."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris for three days?"}],
        tools=[
            {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
            {
                "type": "function",
                "function": {"name": "get_time", "parameters": {"type": "object"}},
            },
        ],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=100,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER)
    assert "paris" in arguments["city"].lower()


async def take_two_turns(client: openai.AsyncOpenAI, model: str) -> None:
    """The second goes on where the first has ended."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Name a colour in one word."}
    ]
    first = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=8
    )
    assert first.usage is not None
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And another one?"},
    ]
    second = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=8
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 1


async def test_a_real_answer() -> None:
    async with asyncio.timeout(END):
        process = await asyncio.create_subprocess_exec(
            os.environ["MESHNET"],
            "serve",
            MODEL,
            "--stages=2",
            "--listen=127.0.0.1:0",
            "--mesh-listen=127.0.0.1:0",
            "--json",
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            said = json.loads(await process.stdout.readline())
            assert len(said["workers"]) == 2
            async with openai.AsyncOpenAI(base_url=said["url"], api_key="x") as client:
                stream = await client.chat.completions.create(
                    model=said["model"],
                    messages=[{"role": "user", "content": "Say: The sky is blue."}],
                    temperature=0,
                    max_tokens=20,
                    stream=True,
                )
                text = "".join([c.choices[0].delta.content or "" async for c in stream])
                listed = await client.chat.completions.create(
                    model=said["model"],
                    messages=[{"role": "user", "content": "Name three planets."}],
                    temperature=0,
                    max_tokens=20,
                )
                assert (listed.choices[0].message.content or "").startswith("1. Mars\n2. Venus\n3.")
                await call_a_tool(client, said["model"])
                await take_two_turns(client, said["model"])
            assert "sky" in text.lower()
            assert "<|im_end|>" not in text
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
