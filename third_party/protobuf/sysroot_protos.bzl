"""The well-known .proto files of the sysroot as a repository of proto_library targets."""

_INCLUDE = "/opt/sysroot/usr/include/google/protobuf"

# Name of the .proto file to the names that it imports.
_FILES = {
    "any": [],
    "api": ["source_context", "type"],
    "descriptor": [],
    "duration": [],
    "empty": [],
    "field_mask": [],
    "source_context": [],
    "struct": [],
    "timestamp": [],
    "type": ["any", "source_context"],
    "wrappers": [],
}

def _sysroot_protos_impl(repository_ctx):
    targets = ['package(default_visibility = ["//visibility:public"])']
    for name, imports in _FILES.items():
        source = "google/protobuf/%s.proto" % name
        repository_ctx.symlink("%s/%s.proto" % (_INCLUDE, name), source)
        targets.append("proto_library(name = %r, srcs = [%r], deps = %r)" % (
            name + "_proto",
            source,
            [":%s_proto" % needed for needed in imports],
        ))
    repository_ctx.file("BUILD.bazel", "\n".join(targets) + "\n")

sysroot_protos = repository_rule(
    implementation = _sysroot_protos_impl,
    environ = ["MESHNET_BUILD_ROOT_KEY"],
    doc = "proto_library targets NAME_proto for google/protobuf/NAME.proto of the sysroot.",
)
