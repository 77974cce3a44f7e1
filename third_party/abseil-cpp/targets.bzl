"""The labels of one Abseil package, all backed by the whole static Abseil."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def absl_targets(names):
    """Declares a cc_library for each name.

    Args:
      names: the target names that the registry module has in this package.
    """
    for name in names:
        cc_library(
            name = name,
            visibility = ["//visibility:public"],
            deps = ["//:static"],
        )
