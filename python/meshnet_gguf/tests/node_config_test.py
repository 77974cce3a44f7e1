"""A node's YAML: what is taken, and that everything else is refused with its place."""

import importlib.resources
import pathlib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from meshnet_gguf.client import LayerRange
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.node import Backoff, Supervision, load_config, parse_config

from proto.meshnet.shard.v1 import errors_pb2

BASE = pathlib.Path("/etc/meshnet")
MINIMAL: dict[str, Any] = {
    "node": {"id": "n1", "folder": "state"},
    "tracker": {"endpoints": ["127.0.0.1:7100"]},
    "model": {"id": "m", "file": "../models/m.gguf"},
}


def parse(**changes: dict[str, Any]) -> Any:
    values = {name: {**MINIMAL.get(name, {}), **changes.get(name, {})} for name in MINIMAL}
    extra = {name: value for name, value in changes.items() if name not in MINIMAL}
    return parse_config(yaml.safe_dump({**values, **extra}), BASE)


def refusal(content: str) -> str:
    with pytest.raises(MeshnetError) as caught:
        parse_config(content, BASE)
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID
    return caught.value.message


def test_what_is_required_is_enough() -> None:
    config = parse()
    assert config.node_id == "n1"
    assert config.folder == BASE / "state"
    assert config.model_file == BASE / "../models/m.gguf"
    assert config.layers is None
    assert config.trackers == ("127.0.0.1:7100",)
    assert config.supervision == Supervision()


def test_paths_start_at_the_file() -> None:
    config = parse(worker={"route_token_keys": "tracker.pem.pub"})
    assert config.route_token_keys == BASE / "tracker.pem.pub"
    assert parse().route_token_keys is None


def test_the_sample_is_valid_and_shows_the_defaults() -> None:
    sample = importlib.resources.files("meshnet_gguf.node").joinpath("node.sample.yaml")
    config = parse_config(sample.read_bytes(), BASE)
    plain = parse()
    assert config.layers == LayerRange(0, 15)
    assert config.worker_flags == {"context_tokens": "4096", "max_sessions": "8"}
    for name in (
        "supervision",
        "measure_every_ms",
        "measure_bytes",
        "listen",
        "keep_logs",
        "worker_listen",
        "engine",
        "security",
        "tracker_timeout_ms",
    ):
        assert getattr(config, name) == getattr(plain, name), name


def test_every_key_of_the_schema_is_in_the_sample() -> None:
    folder = importlib.resources.files("meshnet_gguf.node")
    schema = yaml.safe_load(folder.joinpath("node.schema.json").read_text())
    text = folder.joinpath("node.sample.yaml").read_text()
    for section, content in schema["properties"].items():
        assert f"{section}:" in text
        for key in content.get("properties", {}):
            assert f" {key}: " in text or f" {key}:\n" in text or f" {key}: #" in text, key


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("node", {"id": "no spaces"}, "node.id: "),
        ("node", {"naem": 1}, "'naem' was unexpected"),
        ("node", {"listen": "nowhere"}, "node.listen: "),
        ("node", {"listen": "0.0.0.0:1"}, "node.advertise: "),
        ("tracker", {"endpoints": []}, "tracker.endpoints: "),
        ("model", {"layers": [3, 3]}, "model.layers: "),
        ("model", {"layers": [-1, 3]}, "model.layers.0: "),
        ("model", {"layers": [1, 2, 3]}, "model.layers: "),
        ("model", {"artifact_sha256": "f"}, "model.artifact_sha256: "),
        ("worker", {"engine": "fake"}, "model: expected either file or manifest"),
        ("model", {"manifest": "m.json"}, "model: expected either file or manifest"),
        ("model", {"sources": ["a"]}, "model: expected manifest, sources and storage together"),
        ("worker", {"flags": {"listen": "x"}}, "worker.flags: listen follow"),
        ("worker", {"flags": {"--model": "x"}}, "worker.flags"),
        ("worker", {"flags": {"worker_id": "x"}}, "worker.flags: worker_id follow"),
        ("worker", {"flags": {"threads": [1]}}, "worker.flags.threads: "),
        ("worker", {"listen": "[::]:1"}, "worker.advertise: "),
        ("supervision", {"probe_failures": 0}, "supervision.probe_failures: "),
        ("supervision", {"backoff_first_ms": 9, "backoff_most_ms": 8}, "supervision: "),
        ("tls", {"certificate": "a"}, "'key' is a required property"),
        ("measurement", {"payload_bytes": 1 << 30}, "measurement.payload_bytes: "),
    ],
)
def test_what_is_refused(section: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshnetError) as caught:
        parse(**{section: values})
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file: None is not of type 'object'"),
        ("[", "expected YAML"),
        ("node: {id: a, id: b}", "expected every key once, got 'id' again"),
        ("node: !!python/object/apply:os.system ['x']", "expected YAML"),
        ("? [a]\n: b", "expected"),
        ("[" * 5000, "expected YAML"),
    ],
)
def test_what_is_no_configuration_at_all(content: str, said: str) -> None:
    assert said in refusal(content)


@given(st.text(max_size=200))
def test_any_text_is_refused_in_our_words(content: str) -> None:
    refusal(content)


def test_a_file_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(MeshnetError, match="expected a readable file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("node: 1")
    with pytest.raises(MeshnetError, match=r"bad\.yaml: "):
        load_config(tmp_path / "bad.yaml")


def test_pauses_double_up_to_the_most_and_begin_anew_after_stable_service() -> None:
    backoff = Backoff(Supervision(backoff_first_ms=100, backoff_most_ms=700, stable_after_ms=50))
    assert [backoff.pause_ms(0) for _ in range(5)] == [100, 200, 400, 700, 700]
    assert backoff.pause_ms(49) == 700
    assert [backoff.pause_ms(50), backoff.pause_ms(0)] == [100, 200]
