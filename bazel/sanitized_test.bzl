"""A test that runs under the address sanitizer whatever the command line says.

    load("//bazel:sanitized_test.bzl", "sanitized_test")

    sanitized_test(
        name = "parser_asan_test",
        test = ":parser_test",
    )

For code that reads what strangers send; --config=asan checks everything, and undefined behaviour as well. The test and all
that it depends on are built a second time.
"""

_COPT = "//command_line_option:copt"
_LINKOPT = "//command_line_option:linkopt"

def _with_asan_impl(settings, _attr):
    copts = settings[_COPT]
    if [copt for copt in copts if copt.startswith("-fsanitize=")]:
        # The command line has chosen; two sanitizers do not go together.
        return {_COPT: copts, _LINKOPT: settings[_LINKOPT]}
    return {
        _COPT: copts + ["-O1", "-fsanitize=address", "-fno-omit-frame-pointer"],
        _LINKOPT: settings[_LINKOPT] + ["-fsanitize=address", "-static-libasan"],
    }

_with_asan = transition(
    implementation = _with_asan_impl,
    inputs = [_COPT, _LINKOPT],
    outputs = [_COPT, _LINKOPT],
)

def _sanitized_test_impl(ctx):
    (test,) = ctx.attr.test
    executable = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.symlink(
        output = executable,
        target_file = test[DefaultInfo].files_to_run.executable,
        is_executable = True,
    )
    return [
        DefaultInfo(executable = executable, runfiles = test[DefaultInfo].default_runfiles),
        testing.TestEnvironment({"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=1"}),
    ]

sanitized_test = rule(
    implementation = _sanitized_test_impl,
    attrs = {
        "test": attr.label(
            mandatory = True,
            cfg = _with_asan,
            executable = True,
            doc = "The cc_test to build and run so.",
        ),
        "_allowlist_function_transition": attr.label(default = "@bazel_tools//tools/allowlists/function_transition_allowlist"),
    },
    doc = "Runs a cc_test, built with the address sanitizer.",
    test = True,
)
