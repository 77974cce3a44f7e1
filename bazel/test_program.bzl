"""A test as a program, for a test that starts it as somebody would who types `bazel test`.

    load("//bazel:test_program.bzl", "test_program")

    test_program(name = "route", args = ["tests/integration/route_test.py"], test = "//tests/integration:route_test")

    py_pytest(..., data = [":route"], env = {"ROUTE": "$(rootpath :route)"})

It runs in the runfiles of who starts it (TEST_SRCDIR) with the environment that Bazel gives to the test; what the rule of the test
says in `args` has to be said again.
"""

def _test_program_impl(ctx):
    test = ctx.attr.test
    program = ctx.actions.declare_file(ctx.label.name)
    lines = ["#!/bin/bash", "export RUNFILES_DIR=$TEST_SRCDIR", 'cd "$TEST_SRCDIR/$TEST_WORKSPACE" || exit']
    lines += ["export %s='%s'" % pair for pair in sorted(test[RunEnvironmentInfo].environment.items())]
    lines.append("exec '%s' %s" % (test[DefaultInfo].files_to_run.executable.short_path, " ".join(ctx.attr.args)))
    ctx.actions.write(program, "\n".join(lines) + "\n", is_executable = True)
    runfiles = ctx.runfiles(files = [program]).merge(test[DefaultInfo].default_runfiles)
    return [DefaultInfo(executable = program, files = depset([program]), runfiles = runfiles)]

test_program = rule(
    implementation = _test_program_impl,
    attrs = {"test": attr.label(mandatory = True, providers = [RunEnvironmentInfo])},
    executable = True,
)
