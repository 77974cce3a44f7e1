"""What is refused before anything is done: bodies, keys, lines that are full."""

import asyncio
import json
import logging
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from meshnet_gguf.gateway import Admission, ApiKeys, GatewayOptions, KeyLimits, _serving
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway

END = 60.0
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 2,
}
SLOW = ("--fake_delay=3ms", "--context_tokens=100000")
TOOL = {"type": "function", "function": {"name": "f"}}
LONG_SCHEMA = {"name": "a", "schema": {"enum": ["a" * 1000] * 66}}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"not": value}
    return value


def earlier_call(arguments: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


# One gateway for all tests that only ask it.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(gateway: FakeGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=END) as client:
        yield client


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": []}, "FIELD_OUT_OF_BOUNDS", "messages"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "FIELD_OUT_OF_BOUNDS",
            "messages.0.role",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "FIELD_OUT_OF_BOUNDS",
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "FEATURE_UNSUPPORTED",
            "messages.0.content.0.type",
        ),
        ({"max_tokens": 0}, "FIELD_OUT_OF_BOUNDS", "max_tokens"),
        ({"max_tokens": 2**70}, "FIELD_OUT_OF_BOUNDS", "max_tokens"),
        ({"max_tokens": 10**9}, "CONTEXT_EXCEEDED", "max_tokens"),
        ({"max_tokens": 5000}, "CONTEXT_EXCEEDED", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "a" * 5000}]},
            "CONTEXT_EXCEEDED",
            "messages",
        ),
        # Nobody's tokenizer is asked.
        ({"messages": [{"role": "user", "content": "a" * 2**21}]}, "CONTEXT_EXCEEDED", None),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]},
            "FIELD_OUT_OF_BOUNDS",
            "tools.0.function.parameters",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": nested(900)},
                }
            },
            "FIELD_OUT_OF_BOUNDS",
            "response_format.json_schema.schema",
        ),
        (
            {"messages": [earlier_call(json.dumps(nested(900)))]},
            "FIELD_OUT_OF_BOUNDS",
            "messages.0.tool_calls.0.function.arguments",
        ),
        (
            {"messages": [earlier_call('{"a":' * 50_000 + "1" + "}" * 50_000)]},
            "FIELD_OUT_OF_BOUNDS",
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"temperature": 2.5}, "FIELD_OUT_OF_BOUNDS", "temperature"),
        ({"temperature": float("nan")}, "FIELD_OUT_OF_BOUNDS", "temperature"),
        ({"top_p": -0.1}, "FIELD_OUT_OF_BOUNDS", "top_p"),
        ({"n": 0}, "FIELD_OUT_OF_BOUNDS", "n"),
        ({"n": 9}, "FIELD_OUT_OF_BOUNDS", "n"),
        ({"n": "2"}, "FIELD_OUT_OF_BOUNDS", "n"),
        ({"n": True}, "FIELD_OUT_OF_BOUNDS", "n"),
        ({"stream": "yes"}, "FIELD_OUT_OF_BOUNDS", "stream"),
        ({"temperature": "0.5"}, "FIELD_OUT_OF_BOUNDS", "temperature"),
        ({"stop": ""}, "FIELD_OUT_OF_BOUNDS", "stop"),
        ({"stop": ["a"] * 17}, "FIELD_OUT_OF_BOUNDS", "stop"),
        ({"top_logprobs": 3}, "FIELD_OUT_OF_BOUNDS", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "FIELD_OUT_OF_BOUNDS", "top_logprobs"),
        ({"logit_bias": {"99999": 1}}, "TOKEN_OUT_OF_RANGE", "logit_bias"),
        ({"logit_bias": {"x": 1}}, "TOKEN_OUT_OF_RANGE", "logit_bias"),
        (
            {"chat_template_kwargs": {"messages": "x"}},
            "FIELD_OUT_OF_BOUNDS",
            "chat_template_kwargs",
        ),
        ({"stream_options": {"include_usage": True}}, "FIELD_OUT_OF_BOUNDS", "stream_options"),
        ({"stop": ["a", 5]}, "FIELD_OUT_OF_BOUNDS", "stop.1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "FIELD_OUT_OF_BOUNDS",
            "messages.0.content.0.text",
        ),
        ({"logit_bias": {"5": 101}}, "FIELD_OUT_OF_BOUNDS", "logit_bias.5"),
        ({"no_such_field": 1}, "UNKNOWN_FIELD", "no_such_field"),
        ({"no-such-field": 1}, "UNKNOWN_FIELD", "no-such-field"),
        ({"str": 1}, "UNKNOWN_FIELD", "str"),
        ({"a" * 500: 1}, "UNKNOWN_FIELD", "a" * 64),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            "UNKNOWN_FIELD",
            "tool_choice.name",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
            "FEATURE_UNSUPPORTED",
            "tool_choice.type",
        ),
        ({"tools": [{"type": "custom"}]}, "FEATURE_UNSUPPORTED", "tools.0.type"),
        (
            {"messages": [{f"field {number}": 1 for number in range(10_001)}]},
            "FIELD_OUT_OF_BOUNDS",
            None,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": LONG_SCHEMA}},
            "GRAMMAR_INVALID",
            "response_format",
        ),
        ({"functions": [{"name": "f"}]}, "FEATURE_UNSUPPORTED", "functions"),
        ({"web_search_options": {}}, "FEATURE_UNSUPPORTED", "web_search_options"),
        ({"model": "other"}, "NOT_SERVED", "model"),
    ],
)
async def test_a_wrong_field_is_named(
    http: httpx.AsyncClient, change: dict[str, Any], code: str, param: str | None
) -> None:
    body = json.dumps({**HELLO, **change})
    answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert answer.status_code == (404 if code == "NOT_SERVED" else 400)
    assert error["type"] == ("not_found_error" if code == "NOT_SERVED" else "invalid_request_error")


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([5, 999], "TOKEN_OUT_OF_RANGE"),
        ([[5], [999]], "TOKEN_OUT_OF_RANGE"),
        ([5] * 1_000_000, "CONTEXT_EXCEEDED"),
        ([], "FIELD_OUT_OF_BOUNDS"),
        ([[]], "FIELD_OUT_OF_BOUNDS"),
        ({}, "FIELD_OUT_OF_BOUNDS"),
    ],
)
async def test_a_wrong_prompt_is_named(http: httpx.AsyncClient, prompt: Any, code: str) -> None:
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert error["param"].split(".")[0] == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff",
        b'{"a":' * 50_000,
        # Half a character, and half a character in an encoding that is not JSON's.
        b'{"model": "\\ud800"}',
        b'{"model": "\xed\xa0\x80"}',
        '{"model": "\\ud800"}'.encode("utf-16"),
    ],
)
async def test_what_is_no_json_object_is_malformed(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "MALFORMED_MESSAGE")


async def test_a_browsers_form_is_no_request(http: httpx.AsyncClient) -> None:
    answer = await http.post(
        CHAT, content=json.dumps(HELLO), headers={"content-type": "text/plain"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "MALFORMED_MESSAGE")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8080"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "192.0.2.1"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "localhost:9", "origin": "http://127.0.0.1:3000"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "LOCALHOST."}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/", "/status.json", "/metrics"])
async def test_a_page_under_a_name_of_its_own_is_refused(
    http: httpx.AsyncClient, path: str, headers: dict[str, str], status: int
) -> None:
    answer = await http.get(path, headers=headers)
    assert answer.status_code == status
    if status == 403:
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("NOT_SERVED", "permission_error")
        assert "--allowed-hosts" in error["message"]


async def test_a_second_host_is_refused(gateway: FakeGateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"403"
    writer.close()
    await writer.wait_closed()


async def test_what_a_prober_is_told_without_a_key(tmp_path: pathlib.Path) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    alice = keys.add("alice")
    options = GatewayOptions(keys=keys, ready_seconds=30, hosts=None)
    async with (
        asyncio.timeout(END),
        fake_gateway(options=options) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=END) as http,
    ):
        with_key = {"authorization": f"Bearer {alice}", "host": "any.example"}
        assert (await http.get("/readyz")).json() == {"ready": True, "reasons": []}
        await gateway.fake.cluster.workers[1].kill()
        (await http.get("/v1/models", headers=with_key)).raise_for_status()
        while (answer := await http.get("/readyz")).status_code != 503:
            await asyncio.sleep(0.05)
        assert answer.json() == {"ready": False, "reasons": ["PEER_UNREACHABLE"]}
        # The whole of the same for whoever has a key.
        said = (await http.get("/readyz", headers=with_key)).json()["models"][MODEL]
        assert gateway.fake.cluster.endpoints[1] in said
        metrics = (await http.get("/metrics")).text
        assert not any(where in metrics for where in gateway.fake.cluster.endpoints)
        assert (await http.get("/status.json")).status_code == 401


async def test_other_paths_and_methods_are_errors_in_the_same_form(
    http: httpx.AsyncClient,
) -> None:
    for answer in (await http.get("/v1/other"), await http.get(CHAT)):
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["code"] == "NOT_SERVED"
    assert answer.headers["allow"] == "POST"


async def test_a_long_body_and_a_slow_one_are_refused() -> None:
    options = GatewayOptions(max_request_bytes=2000, body_seconds=0.2)
    async with (
        asyncio.timeout(END),
        fake_gateway((), options=options) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=END) as http,
    ):
        answer = await http.post(
            CHAT, content=b"x" * 2001, headers={"content-type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "FRAME_TOO_LARGE")
        assert answer.headers["connection"] == "close"

        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 9\r\n\r\n{{".encode())
        assert (await reader.readline()).split()[1] == b"408"
        assert b"DEADLINE_EXCEEDED" in await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_keys(tmp_path: pathlib.Path) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    alice = keys.add("alice")
    bob = keys.add("bob", KeyLimits(requests_per_minute=1))
    carol = keys.add("carol", KeyLimits(max_active=1))
    options = GatewayOptions(keys=keys)
    async with (
        asyncio.timeout(END),
        fake_gateway((), options=options, api_key=alice) as gateway,
    ):
        assert (await gateway.client.chat.completions.create(**HELLO)).choices
        assert (await gateway.client.models.list()).data
        wrong = gateway.client.with_options(api_key="sk-meshnet-wrong")
        with pytest.raises(openai.AuthenticationError) as unknown:
            await wrong.chat.completions.create(**HELLO)
        assert unknown.value.code == "UNAUTHENTICATED"
        assert unknown.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()

        limited = gateway.client.with_options(api_key=bob)
        await limited.chat.completions.create(**HELLO)
        with pytest.raises(openai.RateLimitError) as caught:
            await limited.chat.completions.create(**HELLO)
        assert caught.value.code == "RATE_LIMITED"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60

        busy = gateway.client.with_options(api_key=carol)
        with pytest.raises(openai.RateLimitError) as too_many:
            await busy.chat.completions.create(**HELLO, n=2)
        assert too_many.value.code == "RATE_LIMITED"
        assert too_many.value.response.headers["retry-after"] == "1"
        await busy.chat.completions.create(**HELLO)


async def test_a_full_line_is_429_with_a_time_to_come_again() -> None:
    admission = Admission(max_active=1, max_queued=0)
    async with asyncio.timeout(END), fake_gateway((), *SLOW, admission=admission) as gateway:
        stream = await gateway.client.chat.completions.create(
            **{**HELLO, "max_tokens": 50000}, stream=True
        )
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.client.chat.completions.create(**HELLO)
        assert caught.value.code == "QUEUE_FULL"
        assert caught.value.response.headers["retry-after"] == "1"
        await stream.close()
        patient = gateway.client.with_options(max_retries=5)
        assert (await patient.chat.completions.create(**HELLO)).choices


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_a_fault_of_our_own_is_logged_by_its_place(
    log_prompts: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an exception says may be what somebody has asked."""

    async def failing(*arguments: Any) -> list[str]:
        said = arguments[3].messages[0].text
        try:
            raise KeyError(said)
        except KeyError as error:
            raise ValueError(f"no good: {said}") from error

    monkeypatch.setattr(_serving, "chat_pieces", failing)
    secret = "a secret that nobody else may read"
    options = GatewayOptions(log_prompts=log_prompts)
    async with asyncio.timeout(END), fake_gateway((), options=options) as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.chat.completions.create(
                **{**HELLO, "messages": [{"role": "user", "content": secret}]}
            )
    assert caught.value.code == "ENGINE_FAILURE"
    assert "the gateway failed (ValueError); its log says more" in caught.value.message
    (logged,) = [line for line in caplog.messages if "failed\n" in line]
    assert caught.value.response.headers["x-request-id"] in logged
    assert logged.index("KeyError") < logged.index("ValueError")
    assert "in failing" in logged
    assert (secret in logged) == log_prompts


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_the_log_holds_no_text_unless_asked(
    log_prompts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"a": {"pattern": "a secret that nobody ("}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    options = GatewayOptions(log_prompts=log_prompts)
    secret = "a secret that nobody else may read"
    body = {**HELLO, "messages": [{"role": "user", "content": secret}]}
    caplog.set_level(logging.DEBUG)
    async with asyncio.timeout(END), fake_gateway((), options=options) as gateway:
        caplog.clear()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=END) as http:
            await http.post(CHAT, json=body)
            for change in (
                {"temperature": secret},
                {"stop": secret * 20},
                {"tools": [tool], "tool_choice": "required"},
                {"messages": [{"role": secret, "content": secret}]},
                {"model": "other"},
            ):
                refused = await http.post(CHAT, json={**body, **change})
                assert refused.status_code in (400, 404)
            asked = await http.post("/v1/completions", json={**HELLO, "prompt": secret})
            assert asked.status_code == 400
            await gateway.fake.wait_idle()
            while len([r for r in caplog.records if r.name == "meshnet.gateway"]) < 7:
                await asyncio.sleep(0.01)
    ours = [record.getMessage() for record in caplog.records if record.name != "hpack"]
    assert any("a secret that nobody" in line for line in ours) == log_prompts
    assert any('"completion_tokens": 2' in line for line in ours)
