"""What a build's events say of its cache, and what is refused. `check` itself needs nginx."""

import json
import pathlib

import pytest

from tools.cache import remote_cache


def events(**counts: int) -> list[str]:
    runners = [{"name": name.replace("_", " "), "count": count} for name, count in counts.items()]
    metrics = {"buildMetrics": {"actionSummary": {"runnerCount": runners}}}
    return [json.dumps({"started": {}}), json.dumps(metrics)]


@pytest.mark.parametrize(
    ("counts", "hits", "actions", "rate"),
    [
        ({"total": 373, "remote_cache_hit": 295, "internal": 78}, 295, 295, 1.0),
        (
            {"total": 300, "remote_cache_hit": 98, "internal": 200, "linux-sandbox": 2},
            98,
            100,
            0.98,
        ),
        # A disk cache's hits are none of the remote one's.
        ({"total": 10, "disk_cache_hit": 10}, 0, 10, 0.0),
        # Nothing to do proves nothing.
        ({"total": 5, "internal": 5}, 0, 0, 0.0),
    ],
)
def test_the_rate_is_of_what_could_have_been_hits(
    counts: dict[str, int], hits: int, actions: int, rate: float
) -> None:
    found = remote_cache.hit_rate(events(**counts))
    assert (found.hits, found.actions) == (hits, actions)
    assert found.rate == rate


def test_a_build_that_did_not_end_has_no_rate() -> None:
    with pytest.raises(remote_cache.CacheError, match="finished build"):
        remote_cache.hit_rate(events()[:1])


@pytest.mark.parametrize(("hits", "code"), [(99, 0), (98, 1)])
def test_rate_says_whether_it_is_enough(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], hits: int, code: int
) -> None:
    file = tmp_path / "events.json"
    file.write_text("\n".join(events(total=100, remote_cache_hit=hits)))
    assert remote_cache.main(["rate", str(file), "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "hits": hits,
        "actions": 100,
        "misses": [],
        "rate": hits / 100,
        "enough": code == 0,
    }


def test_the_actions_that_ran_here_have_names() -> None:
    def event(name: str, thread: int, begin: int, length: int, **more: object) -> dict[str, object]:
        return {"name": name, "tid": thread, "ts": begin, "dur": length, **more}

    def action(name: str, thread: int, begin: int, length: int) -> dict[str, object]:
        arguments = {"mnemonic": "CppCompile"}
        return event(name, thread, begin, length, cat="action processing", args=arguments)

    profile = {
        "traceEvents": [
            event("thread_name", 1, 0, 0),
            action("Compiling hit.cc", 1, 0, 100),
            action("Compiling ran.cc", 2, 0, 100),
            action("Compiling other.cc", 2, 100, 50),
            event("subprocess.run", 2, 40, 20),
        ]
    }
    found = remote_cache.missed_actions(json.dumps(profile))
    assert found == ("CppCompile: Compiling ran.cc",)


def test_without_nginx_it_says_what_to_install(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MESHNET_NGINX", raising=False)
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert remote_cache.main(["serve", "--dir", str(tmp_path / "cache")]) == 1
    assert "apt-get install nginx" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_only_the_writers_password_opens_uploads(tmp_path: pathlib.Path) -> None:
    text = remote_cache.configuration(tmp_path / "c", tmp_path, 8480, tmp_path / "passwords")
    assert "listen 127.0.0.1:8480;" in text
    assert 'limit_except GET {\n        auth_basic "writers";\n' in text
    assert f"auth_basic_user_file {tmp_path}/passwords;" in text
    server = remote_cache.Server(8480, "secret")
    assert server.reader == "http://127.0.0.1:8480"
    assert server.writer == "http://writer:secret@127.0.0.1:8480"
