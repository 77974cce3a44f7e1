"""The reference pages, made of what the program itself says.

tools/bazel run //docs:reference        # writes docs/reference.md and docs/errors.md
"""

from __future__ import annotations

import os
import pathlib

from meshnet.errors import Reason

from meshnet_gguf.cli.commands import COMMANDS, Command, describe
from meshnet_gguf.cures import CONTROL_CURES, CURES
from meshnet_gguf.errors import options_of, reason_name
from meshnet_gguf.gateway import http_statuses
from proto.meshnet.shard.v1 import errors_pb2

__all__ = ["commands_page", "errors_page", "main"]

_NEXT = {
    errors_pb2.RECOVERY_RETRY_CALL: "try again",
    errors_pb2.RECOVERY_RESTART_SESSION: "begin a new session",
    errors_pb2.RECOVERY_FIX_REQUEST: "mend what asks",
}
_CODES = {
    1: "CANCELLED",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    10: "ABORTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    16: "UNAUTHENTICATED",
}
_MADE = "<!-- Made by tools/bazel run //docs:reference; change the program instead. -->"


def commands_page() -> str:
    """docs/reference.md."""
    parts = [
        "# Commands",
        "",
        _MADE,
        "",
        "`meshnet COMMAND [ARGUMENTS] [FLAGS]`; `meshnet COMMAND --help` says the "
        "same. A flag is `--name=value` or `--name value`, "
        "a switch `--name` or `--noname`; what stands behind `--` is no flag.",
        "",
        "## Settings",
        "",
        "Every flag may be set elsewhere. What stands first counts:",
        "",
        "1. the command line: `--listen=127.0.0.1:9000`",
        "2. the environment, for one command: `MESHNET_SERVE_LISTEN`, or for all: `MESHNET_LISTEN`",
        "3. the settings file, by a command's section, or by `all`: "
        "`$MESHNET_SETTINGS`, or `meshnet/settings.yaml` in "
        "`$XDG_CONFIG_HOME` or `~/.config`",
        "",
        "```yaml",
        "all:",
        "  tls-ca: /etc/meshnet/authorities.pem",
        "serve:",
        "  listen: 127.0.0.1:9000",
        "```",
        "",
        "## Exit codes",
        "",
        "| code | means |",
        "| --- | --- |",
        "| 0 | the command did what it says |",
        "| 1 | something was refused or failed; the reason ([errors](errors.md)) is "
        "on stderr, with `--json` also on stdout |",
        "| 2 | the command line makes no sense |",
        "| 130 | interrupted |",
        "",
    ]
    for name in COMMANDS:
        parts += _command(describe(name))
    return "\n".join(parts)


def _command(command: Command) -> list[str]:
    lines = [f"## meshnet {command.name}", "", command.text.strip(), ""]
    lines += ["| flag | default | what |", "| --- | --- | --- |"]
    for flag in command.flags:
        values = "\\|".join(flag.choices) or flag.name.upper()
        value = f"={values}" if flag.takes_value else ""
        default = f"`{flag.default}`" if flag.default else ""
        lines.append(f"| `--{flag.name}{value}` | {default} | {flag.help} |")
    return [*lines, ""]


def errors_page() -> str:
    """docs/errors.md."""
    parts = [
        "# Errors and their cures",
        "",
        _MADE,
        "",
        "Every refusal has one of these reasons; it is the `code` of an error of the "
        "HTTP API, stands before the message of a command, and "
        "in `google.rpc.ErrorInfo` of a gRPC status. A reason never changes its meaning. "
        "HTTP is the status of the gateway's answer; where there are several, the lower ones are "
        "about the request itself: who asks, where, how, and how slowly.",
        "",
        "## Workers, gateway and commands",
        "",
        "| reason | gRPC code | HTTP | the caller may | cure |",
        "| --- | --- | --- | --- | --- |",
    ]
    for value in errors_pb2.Reason.DESCRIPTOR.values:
        if value.number:
            options = options_of(value.number)
            name = reason_name(value.number)
            code = _CODES[options.grpc_code]
            statuses = ", ".join(map(str, http_statuses(value.number)))
            parts.append(
                f"| `{name}` | {code} | {statuses} | {_NEXT[options.recovery]} | {CURES[name]} |"
            )
    parts += [
        "",
        "## Tracker and relay",
        "",
        "| reason | gRPC code | cure |",
        "| --- | --- | --- |",
    ]
    for reason in Reason:
        cure = CONTROL_CURES.get(reason.name) or CURES[reason.name]
        parts.append(f"| `{reason.name}` | {reason.code.name} | {cure} |")
    return "\n".join([*parts, ""])


def main() -> None:
    """Writes the pages into the work tree."""
    docs = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"]) / "docs"
    (docs / "reference.md").write_text(commands_page(), "utf-8")
    (docs / "errors.md").write_text(errors_page(), "utf-8")


if __name__ == "__main__":
    main()
