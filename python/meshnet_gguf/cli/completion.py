"""Prints what makes a shell complete the command line of meshnet.

    meshnet completion bash > ~/.local/share/bash-completion/completions/meshnet
    meshnet completion zsh > ~/.zfunc/_meshnet

For zsh the folder has to be in fpath before compinit runs. Print it again after an upgrade.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import app

from meshnet_gguf.cli import output
from meshnet_gguf.cli.commands import COMMANDS, Command, Flag, describe

__all__ = ["ACTIONS", "bash_completion", "run", "zsh_completion"]

ACTIONS = ("bash", "zsh")


def run(arguments: Sequence[str]) -> int:
    """The command."""
    scripts = {"bash": bash_completion, "zsh": zsh_completion}
    if len(arguments) != 1 or arguments[0] not in scripts:
        raise app.UsageError(f"expected bash or zsh, got {' '.join(arguments)!r}")
    return output.print_file(scripts[arguments[0]]())


def bash_completion() -> str:
    """For bash: commands, their actions, flags, the values of those that have a few, and files."""
    cases = []
    for command in map(describe, COMMANDS):
        words = " ".join(
            f"--{flag.name}{'=' if flag.takes_value else ''}" for flag in command.flags
        )
        cases.append(f"    {command.name}) words='{words} --help' ;;")
    actions = [
        f"      {command.name}) COMPREPLY=($(compgen -W '{' '.join(command.actions)}' "
        '-- "$current")); return ;;'
        for command in map(describe, COMMANDS)
        if command.actions
    ]
    values = {
        flag.name: flag.choices
        for command in map(describe, COMMANDS)
        for flag in command.flags
        if flag.choices
    }
    chosen = [
        f"    --{name}) COMPREPLY=($(compgen -W '{' '.join(choices)}' -- \"$current\")); return ;;"
        for name, choices in sorted(values.items())
    ]
    return "\n".join(
        [
            "# bash completion of meshnet",
            "_meshnet() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" flag="" words=""',
            "  COMPREPLY=()",
            "  if ((COMP_CWORD == 1)); then",
            f"    COMPREPLY=($(compgen -W '{' '.join(COMMANDS)} --help' -- \"$current\"))",
            "    return",
            "  fi",
            '  if ((COMP_CWORD == 2)) && [[ "$current" != -* ]]; then',
            '    case "${COMP_WORDS[1]}" in',
            *actions,
            "    esac",
            "  fi",
            "  # bash takes the = of a flag for a word of its own.",
            '  if [[ "$current" == = ]]; then',
            '    flag="${COMP_WORDS[COMP_CWORD - 1]}" current=""',
            '  elif [[ "${COMP_WORDS[COMP_CWORD - 1]}" == = ]]; then',
            '    flag="${COMP_WORDS[COMP_CWORD - 2]}"',
            "  fi",
            '  case "$flag" in',
            *chosen,
            "  esac",
            '  if [[ -n "$flag" || "$current" != -* ]]; then',
            '    COMPREPLY=($(compgen -f -- "$current"))',
            "    compopt -o filenames 2>/dev/null",
            "    return",
            "  fi",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            '  if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]]; then',
            "    compopt -o nospace 2>/dev/null",
            "  fi",
            "}",
            "complete -F _meshnet meshnet",
            "",
        ]
    )


def zsh_completion() -> str:
    """For zsh: commands and flags with what they are for, actions, values, and files."""
    named = [f"    {_quoted(f'{name}:{summary}')}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "#compdef meshnet",
            "_meshnet() {",
            "  local -a commands",
            "  commands=(",
            *named,
            "    '--help:what there is'",
            "  )",
            "  if ((CURRENT == 2)); then",
            "    _describe command commands",
            "    return",
            "  fi",
            "  local command=${words[2]}",
            "  shift words",
            "  ((CURRENT--))",
            "  case $command in",
            *(line for command in map(describe, COMMANDS) for line in _zsh_case(command)),
            "  esac",
            "}",
            '_meshnet "$@"',
            "",
        ]
    )


def _zsh_case(command: Command) -> list[str]:
    specs = [f"        {_quoted(_zsh_flag(flag))} \\" for flag in command.flags]
    if command.actions:
        specs.append(f"        '1:action:({' '.join(command.actions)})' \\")
    specs.append("        '--help[Flags and an example.]' \\")
    return [f"    {command.name})", "      _arguments \\", *specs, "        '*:file:_files' ;;"]


def _zsh_flag(flag: Flag) -> str:
    said = "".join(f"\\{char}" if char in "[]:\\" else char for char in flag.help)
    often = "*" if flag.repeats else ""
    if not flag.takes_value:
        return f"{often}--{flag.name}[{said}]"
    value = f"({' '.join(flag.choices)})" if flag.choices else "_files"
    return f"{often}--{flag.name}=[{said}]:{flag.name}:{value}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
