"""`meshnet serve` on a real model, split into stages within the memory that is free here."""

import asyncio
import json
import os
import signal

import openai

END = 120.0
MODEL = os.path.realpath(os.environ["MESHNET_TEST_MODEL"])


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
            assert "sky" in text.lower()
            assert "<|im_end|>" not in text
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
