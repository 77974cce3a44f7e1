"""cc_proto_library at the registry module's place; here it is Bazel's own."""

load("@rules_cc//cc:defs.bzl", _cc_proto_library = "cc_proto_library")

cc_proto_library = _cc_proto_library
