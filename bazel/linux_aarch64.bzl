"""Targets built for aarch64 Linux in a build for x86-64, and run here under qemu.

    load("//bazel:linux_aarch64.bzl", "WITH_AARCH64_SDK", "linux_aarch64_files", "linux_aarch64_program", "linux_aarch64_test")

    linux_aarch64_files(name = "aarch64", srcs = [":tarball"], target_compatible_with = WITH_AARCH64_SDK)
    linux_aarch64_program(name = "aarch64_worker", program = "//cc/worker", target_compatible_with = WITH_AARCH64_SDK)
    linux_aarch64_test(name = "parser_aarch64_test", program = ":parser_test", target_compatible_with = WITH_AARCH64_SDK)

Without the SDK (`tools/sdk install aarch64`) they are incompatible, by a constraint whose name is the reason. QEMU_CPU in
a program's environment names the CPU that it runs on; without it that is one with everything that qemu can do.
"""

# The build for aarch64 itself has no use for them.
WITH_AARCH64_SDK = [
    Label("@aarch64_sdk//:sdk"),
    "@platforms//cpu:x86_64",
]

def _for_linux_aarch64_impl(_settings, _attr):
    return {"//command_line_option:platforms": str(Label("//platforms:linux_aarch64"))}

_for_linux_aarch64 = transition(
    implementation = _for_linux_aarch64_impl,
    inputs = [],
    outputs = ["//command_line_option:platforms"],
)

_ALLOWLIST = attr.label(default = "@bazel_tools//tools/allowlists/function_transition_allowlist")

def _linux_aarch64_files_impl(ctx):
    links = []
    for file in ctx.files.srcs:
        link = ctx.actions.declare_file("%s/%s" % (ctx.label.name, file.basename))
        ctx.actions.symlink(output = link, target_file = file)
        links.append(link)
    return [DefaultInfo(files = depset(links))]

linux_aarch64_files = rule(
    implementation = _linux_aarch64_files_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True, cfg = _for_linux_aarch64, mandatory = True),
        "_allowlist_function_transition": _ALLOWLIST,
    },
    doc = "The files of targets as they are for aarch64 Linux, in a folder of the target's name.",
)

def _launcher_impl(ctx):
    (program,) = ctx.attr.program

    # The same program may be there for x86-64 as well.
    binary = ctx.actions.declare_file(ctx.label.name + ".aarch64")
    ctx.actions.symlink(output = binary, target_file = program[DefaultInfo].files_to_run.executable, is_executable = True)
    launcher = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.write(
        launcher,
        """#!/bin/sh
# Runs a program of aarch64 Linux, with the C library of its SDK.
case ${{TEST_SRCDIR:-${{RUNFILES_DIR:-}}}} in
  '') runfiles=$0.runfiles ;;
  *) runfiles=${{TEST_SRCDIR:-$RUNFILES_DIR}} ;;
esac
exec "$runfiles/{qemu}" -L /opt/sdk/aarch64 "$runfiles/{workspace}/{binary}" "$@"
""".format(
            binary = binary.short_path,
            qemu = ctx.file._qemu.short_path.removeprefix("../"),
            workspace = ctx.workspace_name,
        ),
        is_executable = True,
    )

    # It is among its own runfiles, where the one for x86-64 may be.
    data = [
        file
        for file in program[DefaultInfo].default_runfiles.files.to_list()
        if file != program[DefaultInfo].files_to_run.executable
    ]
    runfiles = ctx.runfiles([binary, ctx.file._qemu] + data)
    providers = [DefaultInfo(executable = launcher, runfiles = runfiles)]
    if RunEnvironmentInfo in program:
        providers.append(program[RunEnvironmentInfo])
    return providers

_LAUNCHER_ATTRS = {
    "program": attr.label(
        mandatory = True,
        cfg = _for_linux_aarch64,
        executable = True,
        doc = "The program to build for aarch64 Linux.",
    ),
    "_allowlist_function_transition": _ALLOWLIST,
    "_qemu": attr.label(default = "@aarch64_sdk//:qemu", allow_single_file = True),
}

linux_aarch64_program = rule(
    implementation = _launcher_impl,
    attrs = _LAUNCHER_ATTRS,
    doc = "A program of aarch64 Linux that runs here.",
    executable = True,
)

linux_aarch64_test = rule(
    implementation = _launcher_impl,
    attrs = _LAUNCHER_ATTRS,
    doc = "Runs a cc_test as on aarch64 Linux.",
    test = True,
)
