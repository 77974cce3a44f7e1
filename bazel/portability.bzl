"""A test that a program runs on any Debian 12 or later.

    load("//bazel:portability.bzl", "portable_binary_test")

    portable_binary_test(name = "worker_portability_test", binary = ":worker", args = ["--version"])
"""

load("//bazel:python.bzl", "py_pytest")

def portable_binary_test(name, binary, args = [], exit_code = 0, **kwargs):
    """Tests that a program needs only libc and libm up to GLIBC_2.36, and runs.

    Args:
      name: name of the test.
      binary: label of the program.
      args: arguments to start it with; it must end by itself.
      exit_code: the exit code that it must have with these arguments.
      **kwargs: as for py_pytest.
    """
    py_pytest(
        name = name,
        srcs = [str(Label("//bazel/private:portability_test.py"))],
        data = [binary],
        env = {
            "PORTABILITY_ARGS": json.encode(args),
            "PORTABILITY_BINARY": "$(rootpath %s)" % binary,
            "PORTABILITY_EXIT_CODE": str(exit_code),
        },
        # The build root's Debian 12 sysroot fixes the libc; another toolchain has its own.
        target_compatible_with = [
            "@platforms//cpu:x86_64",
            "@platforms//os:linux",
        ],
        **kwargs
    )
