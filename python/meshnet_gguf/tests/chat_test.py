import datetime

import pytest
from meshnet_gguf import chat
from meshnet_gguf.chat import ChatMessage, render_chat
from meshnet_gguf.errors import MeshnetError

from proto.meshnet.shard.v1 import errors_pb2

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [ChatMessage("user", "Hello <b>&</b>")]


def reason_of(template: str) -> tuple[int, str]:
    with pytest.raises(MeshnetError) as caught:
        render_chat(template, HELLO)
    return caught.value.reason, str(caught.value)


def test_a_template_as_models_ship_it() -> None:
    assert render_chat(SMOLLM2, HELLO) == (
        "<|im_start|>system\nYou are helpful<|im_end|>\n"
        "<|im_start|>user\nHello <b>&</b><|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [ChatMessage("system", "Be short"), *HELLO, ChatMessage("assistant", "Hi")]
    assert render_chat(SMOLLM2, turns, add_generation_prompt=False) == (
        "<|im_start|>system\nBe short<|im_end|>\n<|im_start|>user\nHello <b>&</b><|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n"
    )


def test_blocks_are_trimmed() -> None:
    template = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n"
    )
    assert render_chat(template, HELLO) == "user\n"


def test_special_tokens_tools_and_further_variables() -> None:
    template = (
        "{{ bos_token }}{{ tools | tojson }}{{ eos_token }}{{ thinking }}{{ nothing is defined }}"
    )
    text = render_chat(
        template,
        HELLO,
        bos_token="<s>",
        eos_token="</s>",
        tools=[{"name": "f", "text": "<ä>"}],
        variables={"thinking": "on"},
    )
    assert text == '<s>[{"name": "f", "text": "<ä>"}]</s>onFalse'


def test_tojson_indents() -> None:
    assert render_chat("{{ {'a': 1} | tojson(indent=2) }}", HELLO) == '{\n  "a": 1\n}'


def test_tools_are_none_when_there_are_none() -> None:
    assert render_chat("{{ tools is none }}", HELLO, tools=[]) == "True"


def test_strftime_now_takes_the_clock() -> None:
    def now() -> datetime.datetime:
        return datetime.datetime(2026, 2, 3, tzinfo=datetime.UTC)

    assert render_chat("{{ strftime_now('%d %b %Y') }}", HELLO, now=now) == "03 Feb 2026"


def test_loop_controls_and_generation_blocks() -> None:
    template = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}"
        "{% endfor %}"
    )
    assert render_chat(template, HELLO) == "02"


def test_extra_fields_reach_the_template_but_cannot_replace_the_role() -> None:
    message = ChatMessage("tool", "42", {"tool_call_id": "c1", "role": "system"})
    text = render_chat("{{ messages[0].tool_call_id }} {{ messages[0].role }}", [message])
    assert text == "c1 tool"


def test_raise_exception_is_a_refusal_that_carries_the_text() -> None:
    reason, text = reason_of("{{ raise_exception('roles must alternate') }}")
    assert reason == errors_pb2.REASON_FEATURE_UNSUPPORTED
    assert "roles must alternate" in text


def test_no_template_is_refused() -> None:
    assert reason_of("")[0] == errors_pb2.REASON_FEATURE_UNSUPPORTED


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(100001) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages[0].content.nothing.deeper }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{{ ('a' * 100000000) | length }}",
        "{{ (100000000 * [1]) | length }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_what_a_sandboxed_template_may_not_do(template: str) -> None:
    reason, text = reason_of(template)
    assert reason == errors_pb2.REASON_ARTIFACT_INVALID
    assert "chat template" in text


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_BYTES", 100)
    assert render_chat("{% for i in range(50) %}ä{% endfor %}", HELLO) == "ä" * 50
    reason, text = reason_of("{% for i in range(51) %}ä{% endfor %}")
    assert reason == errors_pb2.REASON_ARTIFACT_INVALID
    assert "more than 100 bytes" in text
