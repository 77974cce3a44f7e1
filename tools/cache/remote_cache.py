"""A Bazel remote cache on this machine (nginx with WebDAV), and the proof that clean clones use it.

    tools/remote_cache serve --dir /srv/bazel-cache      # until it is stopped; prints the addresses
    tools/remote_cache check //cc/worker       # two clean clones; the second one's hit rate
    tools/remote_cache check --filled          # one, which reads what this machine has built
    tools/remote_cache rate events.json        # of a build with --build_event_json_file

Whoever reaches the port may read; writing needs the password of the printed writer's address. The
folder has the layout of Bazel's disk cache, so a disk cache can be served as it is.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import http
import http.client
import json
import os
import pathlib
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "HitRate",
    "Server",
    "configuration",
    "hit_rate",
    "main",
    "missed_actions",
    "serving",
]

REPO = pathlib.Path(__file__).resolve().parents[2]
WANTED_RATE = 0.99
_START_SECONDS = 20.0
_POLL_SECONDS = 0.05
_DEFAULT_PORT = 8480
# Larger than any output of ours; a limit all the same.
_LARGEST = "4g"
_WRITER = "writer"


class CacheError(Exception):
    """What is wrong, and what to do about it."""


@dataclasses.dataclass(frozen=True)
class HitRate:
    """Actions of one build that could have been hits, and those that were."""

    hits: int
    actions: int
    misses: tuple[str, ...] = ()
    """What Bazel says of those that were none, where it is known."""

    @property
    def rate(self) -> float:
        """Between 0 and 1; 0 when nothing was to be done at all."""
        return self.hits / self.actions if self.actions else 0.0


def hit_rate(events: Iterable[str]) -> HitRate:
    """The hit rate of a build, from the lines of its --build_event_json_file.

    Actions that Bazel itself carries out (links, templates, written files) count as neither. Raises
    CacheError when the build did not end.
    """
    for line in events:
        metrics = json.loads(line).get("buildMetrics")
        if metrics is None:
            continue
        counts = {
            runner["name"]: int(runner.get("count", 0))
            for runner in metrics.get("actionSummary", {}).get("runnerCount", [])
        }
        actions = counts.get("total", 0) - counts.get("internal", 0)
        return HitRate(counts.get("remote cache hit", 0), actions)
    raise CacheError("expected the events of a finished build, got none with its metrics")


def missed_actions(profile: str) -> tuple[str, ...]:
    """Those actions of a build that ran here, from its --profile (with --noslim_profile).

    An action is on one thread from its beginning to its end.
    """
    events = json.loads(profile)["traceEvents"]
    started = [(event["tid"], event["ts"]) for event in events if event["name"] == "subprocess.run"]
    names = [
        f"{action['args']['mnemonic']}: {action['name']}"
        for action in events
        if action.get("cat") == "action processing"
        and any(
            thread == action["tid"] and action["ts"] <= at < action["ts"] + action["dur"]
            for thread, at in started
        )
    ]
    return tuple(sorted(names))


def find_nginx() -> pathlib.Path:
    """nginx with its WebDAV module: $MESHNET_NGINX, or what is installed, or what `get` fetched."""
    chosen = os.environ.get("MESHNET_NGINX")
    for path in [chosen, shutil.which("nginx"), "/usr/sbin/nginx", _fetched() / "usr/sbin/nginx"]:
        if path and os.access(path, os.X_OK):
            return pathlib.Path(path)
    raise CacheError(
        "nginx is missing. Install it (apt-get install nginx), or let `tools/remote_cache get` put"
        " Debian's package into the cache folder, for this tool alone"
    )


def _fetched() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return pathlib.Path(os.environ.get("MESHNET_CACHE") or f"{home}/meshnet") / "nginx"


def get_nginx() -> pathlib.Path:
    """Debian's nginx, unpacked into the cache folder and not installed; what is there will do."""
    with contextlib.suppress(CacheError):
        return find_nginx()
    target = _fetched()
    with tempfile.TemporaryDirectory() as folder:
        # apt fetches as a user of its own where it may.
        pathlib.Path(folder).chmod(0o755)
        download = ["apt-get", "--quiet", "download", "nginx"]
        if subprocess.run(download, cwd=folder, check=False).returncode != 0:
            # A machine whose lists are old or missing.
            subprocess.run(["apt-get", "--quiet", "update"], check=True)
            subprocess.run(download, cwd=folder, check=True)
        (package,) = pathlib.Path(folder).glob("nginx_*.deb")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "--extract", package, target], check=True)
    return target / "usr/sbin/nginx"


def configuration(
    folder: pathlib.Path, run: pathlib.Path, port: int, passwords: pathlib.Path
) -> str:
    """nginx's configuration: everybody on loopback reads, the writer writes.

    An upload is received beside its place and renamed into it, so nobody reads half of one.
    """
    as_user = ""
    if os.getuid() == 0:
        # nginx takes this from nobody else.
        as_user = f"user {pwd.getpwuid(os.getuid()).pw_name};\n"
        # A sandbox may let nobody set groups, which each process that it starts has to.
        if pathlib.Path("/proc/self/setgroups").read_text("utf-8") == "deny\n":
            as_user += "master_process off;\n"
    temporary = "\n".join(
        f"  {kind}_temp_path {run}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""{as_user}daemon off;
worker_processes 2;
pid {run}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/uploads;
{temporary}
  client_max_body_size {_LARGEST};
  sendfile on;
  keepalive_requests 100000;
  server {{
    listen 127.0.0.1:{port};
    location / {{ return 404; }}
    # Names are SHA-256 in hexadecimal; nothing else is a path here.
    location ~ "^/(ac|cas)/([0-9a-f]{{2}})([0-9a-f]{{62}})$" {{
      alias {folder}/$1/$2/$2$3;
      dav_methods PUT;
      create_full_put_path on;
      log_not_found off;
      limit_except GET {{
        auth_basic "writers";
        auth_basic_user_file {passwords};
      }}
    }}
  }}
}}
"""


def _password_line(password: str) -> str:
    """A line of a password file, in the salted form that nginx reads without crypt()."""
    salt = secrets.token_bytes(16)
    digest = hashlib.sha1(password.encode() + salt, usedforsecurity=False).digest()
    return f"{_WRITER}:{{SSHA}}{base64.b64encode(digest + salt).decode()}\n"


@dataclasses.dataclass(frozen=True)
class Server:
    """A cache that is served."""

    port: int
    password: str

    @property
    def reader(self) -> str:
        """The address for those who may only read."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def writer(self) -> str:
        """The address for those who may write."""
        return f"http://{_WRITER}:{self.password}@127.0.0.1:{self.port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def serving(folder: pathlib.Path, port: int = 0) -> Iterator[Server]:
    """Serves `folder` (made when missing) while the block runs; port 0 takes a free one.

    Raises CacheError when nginx is missing or does not start.
    """
    program = find_nginx()
    for name in ("ac", "cas", "uploads"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    server = Server(port or _free_port(), secrets.token_urlsafe(24))
    with tempfile.TemporaryDirectory(prefix="meshnet-cache-") as run_name:
        run = pathlib.Path(run_name)
        passwords = run / "passwords"
        passwords.touch(0o600)
        passwords.write_text(_password_line(server.password))
        settings = run / "nginx.conf"
        settings.write_text(configuration(folder.absolute(), run, server.port, passwords))
        process = subprocess.Popen(
            [program, "-c", settings, "-p", run, "-e", "stderr"], stdin=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _answers(server.port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CacheError(
                        f"nginx does not serve on port {server.port} (see above); choose another"
                        " --port, or a --dir that you may write to"
                    )
                time.sleep(_POLL_SECONDS)
            yield server
        finally:
            process.terminate()
            process.wait()


def _put(address: str, content: bytes) -> int:
    """The status with which an upload is answered."""
    name = f"/cas/{hashlib.sha256(content).hexdigest()}"
    parts = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=30)
    headers = {}
    if parts.username:
        login = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    with contextlib.closing(connection):
        connection.request("PUT", name, content, headers)
        return connection.getresponse().status


def _check_rights(server: Server) -> None:
    """Raises CacheError unless exactly the writer may write."""
    answers = (_put(server.reader, b"reader"), _put(server.writer, b"writer"))
    if answers[0] != http.HTTPStatus.UNAUTHORIZED or answers[1] not in (
        http.HTTPStatus.CREATED,
        http.HTTPStatus.NO_CONTENT,
    ):
        raise CacheError(f"expected uploads answered with 401 and 201, got {answers}")


def _say(text: str) -> None:
    sys.stderr.write(f"remote_cache: {text}\n")
    sys.stderr.flush()


def _run(command: Sequence[str | pathlib.Path], folder: pathlib.Path = REPO, **more: str) -> None:
    environment = {**os.environ, **more}
    if subprocess.run(command, cwd=folder, env=environment, check=False).returncode != 0:
        raise CacheError(f"{' '.join(str(part) for part in command)} failed (see above)")


def _other_cache(cache: pathlib.Path, other: pathlib.Path) -> None:
    """A cache folder at another path, with what would otherwise be fetched and made once more."""
    other.mkdir()
    for name in ("buildroot", "llama_cpp", "npm"):
        if (cache / name).exists():
            (other / name).symlink_to(cache / name)


class Clone:
    """A clean clone of what is committed, with an output base of its own."""

    def __init__(self, folder: pathlib.Path, cache: pathlib.Path) -> None:
        self._tree = folder / "tree"
        self._base = folder / "base"
        self._cache = str(cache)
        folder.mkdir()
        # In a container the work tree may belong to somebody else, which git refuses to read.
        settings = folder / "gitconfig"
        settings.write_text("[safe]\n\tdirectory = *\n")
        _run(["git", "clone", "--quiet", REPO, self._tree], GIT_CONFIG_GLOBAL=str(settings))

    def _bazel(self, command: str, *arguments: str) -> None:
        entry = str(self._tree / "tools/bazel")
        base = f"--output_base={self._base}"
        # Bazel builds the work tree that it is started in.
        _run([entry, base, command, *arguments], self._tree, MESHNET_CACHE=self._cache)

    def build(self, targets: Sequence[str], flags: Sequence[str]) -> HitRate:
        """Builds without any cache but the remote one."""
        events = self._tree.parent / "events.json"
        profile = self._tree.parent / "profile.json"
        settings = ["--disk_cache=", f"--build_event_json_file={events}", f"--profile={profile}",
                    "--noslim_profile", "--color=no", "--curses=no",
                    "--show_progress_rate_limit=30"]  # fmt: skip
        self._bazel("build", *settings, *flags, "--", *targets)
        with events.open() as lines:
            rate = hit_rate(lines)
        return dataclasses.replace(rate, misses=missed_actions(profile.read_text("utf-8")))

    def remove(self) -> None:
        """Ends Bazel's server and removes its files."""
        with contextlib.suppress(CacheError):
            self._bazel("shutdown")
        shutil.rmtree(self._base, ignore_errors=True)


def check(
    targets: Sequence[str], folder: pathlib.Path | None, filled: bool, cache: pathlib.Path
) -> HitRate:
    """The hit rate of a clean clone in another folder, with another cache folder and output base.

    What it reads was written by a first clone, or is there already (`filled`).
    """
    # Two clones are much for a /tmp in memory.
    place = os.environ.get("TMPDIR") or "/var/tmp"  # noqa: S108
    with tempfile.TemporaryDirectory(dir=place, prefix="meshnet-remote-") as name:
        scratch = pathlib.Path(name)
        with serving(folder or scratch / "cache") as server:
            _check_rights(server)
            if not filled:
                _say("first clone: builds, and writes the cache")
                first = Clone(scratch / "first", cache)
                try:
                    first.build(
                        targets, ["--config=cache_write", f"--remote_cache={server.writer}"]
                    )
                finally:
                    first.remove()
            _say("second clone: reads the cache, with no right to write")
            _other_cache(cache, scratch / "other")
            second = Clone(scratch / "elsewhere", scratch / "other")
            try:
                return second.build(targets, ["--config=cache", f"--remote_cache={server.reader}"])
            finally:
                second.remove()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/remote_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 1 failed or below 99 % (stderr says why), 2 wrong usage",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    sub = command("serve", "Serve a folder as a remote cache on loopback until it is stopped.")
    sub.add_argument("--dir", type=pathlib.Path, required=True, help="made when it is missing")
    sub.add_argument("--port", type=int, default=_DEFAULT_PORT, help="default %(default)s")
    sub = command("check", "Build in two clean clones of what is committed; show the hit rate.")
    sub.add_argument("--dir", type=pathlib.Path, help="serve this folder, and leave it there")
    sub.add_argument(
        "--filled",
        action="store_true",
        help="--dir (default: this machine's disk cache) holds what the first clone would write",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    sub.add_argument("targets", nargs="*", default=["//..."], help="default //...")
    sub = command("rate", "Show the hit rate of a build that has ended.")
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    sub.add_argument("events", type=pathlib.Path, help="its --build_event_json_file")
    command("get", "Put Debian's nginx into the cache folder, for this tool alone.")
    return parser


def _show(rate: HitRate, as_json: bool) -> int:
    enough = rate.rate >= WANTED_RATE
    for name in rate.misses:
        _say(f"missed {name}")
    if as_json:
        values = {**dataclasses.asdict(rate), "rate": rate.rate, "enough": enough}
        sys.stdout.write(json.dumps(values) + "\n")
    else:
        verdict = "enough" if enough else f"expected {WANTED_RATE:.0%} at least"
        sys.stdout.write(
            f"{rate.hits} remote hits of {rate.actions} actions: {rate.rate:.2%}, {verdict}\n"
        )
    return 0 if enough else 1


def _serve(folder: pathlib.Path, port: int) -> int:
    with serving(folder, port) as server:
        sys.stdout.write(f"reader: --config=cache --remote_cache={server.reader}\n")
        sys.stdout.write(f"writer: --config=cache_write --remote_cache={server.writer}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def main(arguments: Sequence[str]) -> int:
    """Runs one command; the value is the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "get":
            sys.stdout.write(f"{get_nginx()}\n")
            return 0
        if options.command == "rate":
            with options.events.open() as lines:
                return _show(hit_rate(lines), options.json)
        if options.command == "serve":
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return _serve(options.dir, options.port)
        cache = _fetched().parent
        if options.filled and options.dir is None:
            options.dir = cache / "disk"
        return _show(check(options.targets, options.dir, options.filled, cache), options.json)
    except (CacheError, OSError, ValueError, subprocess.CalledProcessError) as error:
        _say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
