"""proto_library at the registry module's place; here it is Bazel's own."""

load("@rules_proto//proto:defs.bzl", _proto_library = "proto_library")

proto_library = _proto_library
