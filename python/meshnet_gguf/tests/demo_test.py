import dataclasses
import io
import json

import pytest
import rich.console
from absl import flags
from meshnet.command_line import parse_flags
from meshnet_gguf import demo
from meshnet_gguf.demo import (
    DemoResult,
    StageResult,
    print_table,
)
from meshnet_gguf.errors import MeshnetError

from proto.meshnet.shard.v1 import errors_pb2

STAGE = StageResult(
    stage=0,
    layers=(0, 15),
    owned_tensors=136,
    owned_bytes=64 * 1024 * 1024,
    resident_bytes=100 * 1024 * 1024,
    prefill_tokens_per_s=500.0,
    decode_tokens_per_s=123.4,
    seam_bytes_received=0,
    seam_bytes_sent=24000,
    seam_bytes_sent_per_token=2400.0,
    return_bytes_sent=0,
)
RESULT = DemoResult(
    model="model.gguf",
    text="Paris",
    token_ids=(1, 2),
    reference_token_ids=(1, 2),
    parity="identical",
    compared_logit_rows=2,
    max_logit_difference=0.0,
    prompt_tokens=9,
    ttft_ms=87.6,
    decode_tokens_per_s=61.2,
    stages=(STAGE, dataclasses.replace(STAGE, stage=1, layers=(15, 30), seam_bytes_sent=0)),
)


def test_the_table_names_every_stage_and_the_verdict() -> None:
    output = io.StringIO()
    print_table(RESULT, rich.console.Console(file=output, width=80))
    text = output.getvalue()
    for part in (
        "[0, 15)",
        "[15, 30)",
        "136, 64.0 MiB",
        "100 MiB",
        "123.4",
        "2400/token",
        " 24000 ",
        "272, 128.0 MiB",
        "200 MiB",
        "61.2",
        "88 ms",
        "parity: identical (2 tokens; logits of 2 rows, largest difference 0)",
    ):
        assert part in text


def test_the_json_object_has_what_scripts_read() -> None:
    object_ = json.loads(json.dumps(dataclasses.asdict(RESULT)))
    for name in (
        "text",
        "token_ids",
        "reference_token_ids",
        "parity",
        "ttft_ms",
        "decode_tokens_per_s",
        "stages",
    ):
        assert name in object_
    assert RESULT.identical
    assert not dataclasses.replace(RESULT, parity="different").identical


@pytest.mark.parametrize(("parity", "code"), [("identical", 0), ("different", 1)])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_exit_code_tells_whether_the_answers_agree(
    parity: str,
    code: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run(*_: object) -> DemoResult:
        return dataclasses.replace(RESULT, parity=parity)

    monkeypatch.setattr(demo, "_run", run)
    rest = parse_flags(["demo", "--model=/no/matter", f"--json={as_json}".lower()])
    assert demo.main(rest) == code
    output = capsys.readouterr().out
    if as_json:
        assert json.loads(output)["parity"] == parity
        assert output.count("\n") == 1
    else:
        assert f"parity: {parity} " in output


def test_a_refusal_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*_: object) -> DemoResult:
        raise MeshnetError(errors_pb2.REASON_ARCHITECTURE_UNSUPPORTED, "expected llama, got gpt")

    monkeypatch.setattr(demo, "_run", run)
    assert demo.main(parse_flags(["demo", "--model=/no/matter"])) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "\ndemo: ARCHITECTURE_UNSUPPORTED: expected llama, got gpt\n"


def test_a_fixture_and_a_model_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--model=/no/matter", "--fixture=deepseek4"]
    assert demo.main(parse_flags(arguments)) == 1
    assert "expected --model or --fixture, got both" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["--max-tokens=7", "--max_tokens=7"])
def test_flags_are_spelt_with_hyphens_or_underscores(spelling: str) -> None:
    assert parse_flags(["demo", spelling, "--prompt=a-b", "--", "--x-y"]) == ["demo", "--x-y"]
    assert flags.FLAGS.max_tokens == 7
    assert flags.FLAGS.prompt == "a-b"
