"""C++ targets of this repository.

    load("//bazel:cc.bzl", "meshnet_cc_binary", "meshnet_cc_library", "meshnet_cc_test")

As Bazel's own rules, with our warnings as errors. Third-party code uses Bazel's own rules.
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

MESHNET_COPTS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wvla",
    "-Wno-unused-parameter",
    "-Wno-missing-field-initializers",
    # gcc 12 reports vectors of small structs that it has inlined (GCC bug 104475 and its kin).
    "-Wno-free-nonheap-object",
    "-Werror",
]

def meshnet_cc_library(name, copts = [], **kwargs):
    """A cc_library of our own code.

    Args:
      name: name of the target.
      copts: further compiler flags.
      **kwargs: as for cc_library.
    """
    cc_library(
        name = name,
        copts = MESHNET_COPTS + copts,
        **kwargs
    )

def meshnet_cc_binary(name, copts = [], deps = [], check_cpu = True, **kwargs):
    """A cc_binary of our own code, which refuses to start on a CPU without the baseline.

    Args:
      name: name of the target.
      copts: further compiler flags.
      deps: libraries.
      check_cpu: whether to check the CPU before anything else runs.
      **kwargs: as for cc_binary.
    """
    cc_binary(
        name = name,
        copts = MESHNET_COPTS + copts,
        deps = deps + ([Label("//cc/common/cpu_baseline")] if check_cpu else []),
        **kwargs
    )

def meshnet_cc_test(name, copts = [], deps = [], size = "small", **kwargs):
    """A cc_test of our own code on GoogleTest (with its main program).

    Args:
      name: name of the target.
      copts: further compiler flags.
      deps: libraries under test.
      size: Bazel's test size.
      **kwargs: as for cc_test.
    """
    cc_test(
        name = name,
        size = size,
        copts = MESHNET_COPTS + copts,
        deps = deps + [Label("@googletest//:gtest_main")],
        **kwargs
    )
