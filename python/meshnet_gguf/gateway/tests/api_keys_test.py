import pathlib
import stat

import pytest
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway import ApiKeys, KeyLimits

from proto.meshnet.shard.v1 import errors_pb2


def test_a_key_is_found_by_its_secret_and_stored_as_its_hash(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.json"
    keys = ApiKeys(path)
    secret = keys.add("alice", KeyLimits(max_active=2, requests_per_minute=60))
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = ApiKeys(path).find(secret)
    assert found is not None
    assert (found.name, found.limits) == ("alice", KeyLimits(2, 60))
    assert keys.find(secret[:-1]) is None
    assert keys.find("") is None


def test_a_running_gateway_sees_what_has_changed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys.json"
    running, operator = ApiKeys(path), ApiKeys(path)
    secret = operator.add("alice")
    assert running.find(secret) is not None
    operator.add("bob")
    assert [key.name for key in running.all()] == ["alice", "bob"]
    operator.remove("alice")
    assert running.find(secret) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"keys": [{"name": "a b", "sha256": "' + "0" * 64 + '"}]}',
        '{"keys": [{"name": "a", "sha256": "0"}]}',
        '{"keys": [{"name": "a", "sha256": "' + "0" * 64 + '", "limits": {"max_active": -1}}]}',
        '{"keys": [{"name": "a", "sha256": "' + "0" * 64 + '", "limits": {"other": 1}}]}',
    ],
)
def test_another_file_is_refused(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(MeshnetError) as caught:
        ApiKeys(path)
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID


def test_names_are_checked(tmp_path: pathlib.Path) -> None:
    keys = ApiKeys(tmp_path / "keys.json")
    keys.add("a")
    for act in (lambda: keys.add("a"), lambda: keys.add("a b"), lambda: keys.remove("b")):
        with pytest.raises(MeshnetError):
            act()
