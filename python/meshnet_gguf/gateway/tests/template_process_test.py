"""A template that runs away is ended, and the next one is served."""

import pytest
from meshnet_gguf.chat import ChatMessage
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway import TemplateRenderer

from proto.meshnet.shard.v1 import errors_pb2

HELLO = [ChatMessage("user", "Hello", {"name": "ä"})]
GOOD = "{{ bos_token }}{{ messages[0].content }} {{ messages[0].name }} {{ tools | tojson }}{{ x }}"
# Loops of at most 100,000 numbers, one in another.
FOREVER = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% if a == b %}{% endif %}"
    "{% endfor %}{% endfor %}"
)
GREEDY = (
    "{% set ns = namespace(x=['0123456789' * 100000]) %}"
    "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    "{% for i in range(99999) %}{% for x in ns.x %}{{ '' }}{% endfor %}{% endfor %}"
)


async def good(renderer: TemplateRenderer) -> str:
    return await renderer.render(
        GOOD, HELLO, tools=[{"a": "b"}], variables={"x": "y"}, bos_token="<s>"
    )


async def test_what_it_renders() -> None:
    async with TemplateRenderer() as renderer:
        assert await good(renderer) == '<s>Hello ä [{"a": "b"}]y'


@pytest.mark.parametrize("template", [FOREVER, GREEDY])
async def test_a_template_that_runs_away_is_ended(template: str) -> None:
    async with TemplateRenderer(time_limit=0.5) as renderer:
        with pytest.raises(MeshnetError) as caught:
            await renderer.render(template, HELLO)
        assert caught.value.reason == errors_pb2.REASON_ARTIFACT_INVALID
    async with TemplateRenderer() as renderer:
        with pytest.raises(MeshnetError):
            await renderer.render("{{ 1 / 0 }}", HELLO)
        assert await good(renderer) == '<s>Hello ä [{"a": "b"}]y'


async def test_the_process_is_replaced() -> None:
    """And the next template's time does not begin before there is a new one."""
    async with TemplateRenderer(time_limit=0.5) as renderer:
        for _ in range(2):
            with pytest.raises(MeshnetError):
                await renderer.render(FOREVER, HELLO)
            assert await good(renderer) == '<s>Hello ä [{"a": "b"}]y'


async def test_a_refusal_keeps_its_reason() -> None:
    async with TemplateRenderer() as renderer:
        with pytest.raises(MeshnetError) as caught:
            await renderer.render("{{ raise_exception('no system role') }}", HELLO)
        assert caught.value.reason == errors_pb2.REASON_FEATURE_UNSUPPORTED
        assert "no system role" in caught.value.message
