"""What bash and zsh offer on Tab: real shells, given what `meshnet completion` prints."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import select
import shlex
import subprocess
from collections.abc import Iterator

import pytest
from meshnet_gguf.cli.commands import COMMANDS, describe
from meshnet_gguf.cli.completion import bash_completion, zsh_completion

ZSH = pathlib.Path(os.environ["ZSH"]).absolute()
WAIT = 60.0  # seconds until a zsh that says nothing is given up
FUNCTIONS = ZSH.parent / "functions"


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where the shell is, with one file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    return tmp_path


def offered_flags(name: str) -> set[str]:
    flags = {f"--{flag.name}{'=' * flag.takes_value}" for flag in describe(name).flags}
    return flags | {"--help"}


# ---- bash ----


def completed(*words: str) -> list[str]:
    """What a bash offers for the last word."""
    script = (
        f"{bash_completion()}\nCOMP_WORDS=({shlex.join(words)})\nCOMP_CWORD={len(words) - 1}\n"
        '_meshnet\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-u"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash(folder: pathlib.Path) -> None:
    assert completed("meshnet", "st") == ["status"]
    assert set(completed("meshnet", "")) == {*COMMANDS, "--help"}
    assert completed("meshnet", "status", "--wa") == ["--watch"]
    assert completed("meshnet", "serve", "--mesh-l") == ["--mesh-listen="]
    assert set(completed("meshnet", "serve", "--")) == offered_flags("serve")
    assert completed("meshnet", "serve", "mod") == ["model.gguf"]
    assert completed("meshnet", "serve", "--api-keys", "=", "mod") == ["model.gguf"]
    assert completed("meshnet", "certs", "") == ["init", "issue", "rotate", "retire", "show"]
    assert completed("meshnet", "certs", "init", "mod") == ["model.gguf"]
    assert completed("meshnet", "certs", "--da") == ["--days="]


# ---- zsh ----

# Tab completes as always and notes every match that is found; Ctrl-X answers with the line as it is
# now and those matches, and empties it.
SETTINGS = """
fpath=({zfunc} {functions}/Base {functions}/Zsh {functions})
autoload -Uz compinit && compinit -u -D
typeset -aU noted
note() {{
  compadd() {{
    local -a matches
    # Calls with one of these fill an array and offer nothing.
    if [[ " $*" != *" -"[OAD]" "* ]]; then
      builtin compadd -O matches "$@"
      noted+=($matches)
    fi
    builtin compadd "$@"
  }}
  _main_complete "$@"
}}
answer() {{
  print -rN -- "$BUFFER" $noted $'\\4' >{answers}
  BUFFER= noted=()
}}
zle -C note complete-word note
zle -N answer
bindkey "^I" note
bindkey "^X" answer
LISTMAX=-10000
PS1=
print -rN -- ready $'\\4' >{answers}
"""


class Zsh:
    """A zsh at a terminal, which is read so that it is never full."""

    def __init__(self, terminal: int, answers: int) -> None:
        self._terminal = terminal
        self._answers = answers
        self._shown = b""

    def tab(self, typed: str) -> tuple[str, set[str]]:
        """What the line is after Tab, and the matches that zsh has found."""
        os.write(self._terminal, f"{typed}\t\x18".encode())
        line, *matches = self.answer()
        return line, set(matches)

    def answer(self) -> list[str]:
        """The next one."""
        said = b""
        while not said.endswith(b"\0\4\0"):
            ready, _, _ = select.select([self._terminal, self._answers], [], [], WAIT)
            assert ready, f"zsh is silent after {self._shown.decode('utf-8', 'replace')}"
            if self._terminal in ready:
                self._shown += os.read(self._terminal, 4096)
            if self._answers in ready:
                said += os.read(self._answers, 4096)
        return said.decode().split("\0")[:-2]


@contextlib.contextmanager
def zsh_at_a_terminal(home: pathlib.Path) -> Iterator[Zsh]:
    zfunc = home / ".zfunc"
    zfunc.mkdir(parents=True)
    (zfunc / "_meshnet").write_text(zsh_completion())
    answers = home / "answers"
    os.mkfifo(answers)
    (home / ".zshrc").write_text(SETTINGS.format(zfunc=zfunc, functions=FUNCTIONS, answers=answers))
    # Open at both ends: whoever opens one of them need not wait for the other.
    reader = os.open(answers, os.O_RDWR)
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [ZSH, "-d", "-i"],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        env={"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb", "COLUMNS": "200"},
    )
    os.close(its)
    try:
        zsh = Zsh(ours, reader)
        assert zsh.answer() == ["ready"]
        yield zsh
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(reader)


def test_zsh(folder: pathlib.Path) -> None:
    with zsh_at_a_terminal(folder / "home") as zsh:
        assert zsh.tab("meshnet st")[0] == "meshnet status "
        assert zsh.tab("meshnet ")[1] == {*COMMANDS, "--help"}
        assert zsh.tab("meshnet status --wa")[0] == "meshnet status --watch "
        assert zsh.tab("meshnet serve --mesh-l")[0] == "meshnet serve --mesh-listen="
        for name in COMMANDS:
            # It adds the = of those that take a value by itself, as above.
            flags = {flag.rstrip("=") for flag in offered_flags(name)}
            assert zsh.tab(f"meshnet {name} --")[1] == flags, name
        assert zsh.tab("meshnet serve mod")[0] == "meshnet serve model.gguf "
        for before in ("--api-keys=", "--api-keys "):
            line = f"meshnet serve {before}"
            assert zsh.tab(f"{line}mod")[0] == f"{line}model.gguf "
        actions = {"init", "issue", "rotate", "retire", "show"}
        assert zsh.tab("meshnet certs ")[1] == actions
        assert zsh.tab("meshnet certs init mod")[0] == "meshnet certs init model.gguf "
        assert zsh.tab("meshnet certs --da")[0] == "meshnet certs --days="
