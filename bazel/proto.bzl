"""One .proto file, all its languages.

    load("//bazel:proto.bzl", "meshnet_proto")

    meshnet_proto(
        name = "service",
        src = "service.proto",
        grpc = True,
        deps = [":frame", "@protobuf//:timestamp_proto"],
    )

makes service_proto (proto_library), service_cc_proto, service_cc_grpc (with grpc = True) and service_py. C++ includes
"<folder>/service.pb.h" and "<folder>/service.grpc.pb.h"; Python imports service_pb2 and service_pb2_grpc, both typed,
`from` the folder's dotted name.
"""

load("@protobuf//bazel:cc_proto_library.bzl", "cc_proto_library")
load("@protobuf//bazel:proto_library.bzl", "proto_library")
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_proto//proto:defs.bzl", "ProtoInfo")
load("@rules_python//python:defs.bzl", "py_library")

def _import_path(file, proto):
    """The name under which other .proto files import the file."""
    root = proto.proto_source_root
    path = file.path
    return path[len(root) + 1:] if root != "." and path.startswith(root + "/") else path

def _generate(ctx, tool, suffixes, outs, arguments, tools, mnemonic):
    """Runs protoc on the one source of ctx.attr.proto; outs are names of output options, perhaps with `=PARAMETER:`."""
    proto = ctx.attr.proto[ProtoInfo]
    (source,) = proto.direct_sources
    stem = source.basename.removesuffix(".proto")
    files = [ctx.actions.declare_file(stem + suffix) for suffix in suffixes]

    # The folder that import paths are relative to, among the outputs.
    out = files[0].path.removesuffix("/" + _import_path(source, proto).removesuffix(".proto") + suffixes[0])
    args = ctx.actions.args()
    for option in outs:
        args.add("--" + option + ("" if option.endswith(":") else "=") + out)
    args.add_all(arguments)
    args.add_all(proto.transitive_proto_path, format_each = "-I%s")
    args.add(_import_path(source, proto))
    ctx.actions.run(
        executable = tool,
        arguments = [args],
        inputs = proto.transitive_sources,
        outputs = files,
        tools = tools,
        # Where the tools come from, and with that the build root's key, belongs to the action.
        use_default_shell_env = True,
        mnemonic = mnemonic,
        progress_message = mnemonic + " %{label}",
    )
    return files

def _cc_grpc_sources_impl(ctx):
    plugin = ctx.executable._plugin
    files = _generate(
        ctx,
        tool = ctx.executable._protoc,
        suffixes = [".grpc.pb.h", ".grpc.pb.cc"],
        outs = ["grpc_out"],
        arguments = ["--plugin=protoc-gen-grpc=" + plugin.path],
        tools = [ctx.attr._plugin[DefaultInfo].files_to_run],
        mnemonic = "CcGrpc",
    )
    return [DefaultInfo(files = depset(files)), OutputGroupInfo(hdrs = depset(files[:1]), srcs = depset(files[1:]))]

_cc_grpc_sources = rule(
    implementation = _cc_grpc_sources_impl,
    attrs = {
        "proto": attr.label(mandatory = True, providers = [ProtoInfo]),
        "_plugin": attr.label(default = "@grpc//src/compiler:grpc_cpp_plugin", executable = True, cfg = "exec"),
        "_protoc": attr.label(default = "@protobuf//:protoc", executable = True, cfg = "exec"),
    },
    doc = "Generates the C++ gRPC stubs of one .proto file.",
)

def _py_sources_impl(ctx):
    tool = ctx.attr._protoc[DefaultInfo].files_to_run
    suffixes = ["_pb2.py", "_pb2.pyi"]
    outs = ["python_out", "pyi_out"]
    if ctx.attr.grpc:
        suffixes += ["_pb2_grpc.py", "_pb2_grpc.pyi"]
        outs += ["grpc_python_out", "mypy_grpc_out=quiet:"]
    files = _generate(
        ctx,
        tool = tool,
        suffixes = suffixes,
        outs = outs,
        arguments = ["--plugin=protoc-gen-mypy_grpc=" + ctx.executable._plugin.path] if ctx.attr.grpc else [],
        tools = [ctx.attr._plugin[DefaultInfo].files_to_run] if ctx.attr.grpc else [],
        mnemonic = "PyProto",
    )
    return [
        DefaultInfo(files = depset([file for file in files if file.extension == "py"])),
        OutputGroupInfo(pyi = depset([file for file in files if file.extension == "pyi"])),
    ]

_py_sources = rule(
    implementation = _py_sources_impl,
    attrs = {
        "grpc": attr.bool(doc = "Whether to generate service stubs too."),
        "proto": attr.label(mandatory = True, providers = [ProtoInfo]),
        "_plugin": attr.label(default = "//bazel/private:protoc_gen_mypy_grpc", executable = True, cfg = "exec"),
        "_protoc": attr.label(default = "//bazel/private:py_protoc", executable = True, cfg = "exec"),
    },
    doc = "Generates the Python code and type stubs of one .proto file.",
)

def _with_suffix(label, suffix):
    """//a/b and :c as labels of one of the targets that meshnet_proto makes there."""
    if ":" not in label:
        label = label + ":" + label.split("/")[-1]
    return label + suffix

def meshnet_proto(name, src, deps = [], grpc = False, visibility = None):
    """Makes the proto_library of one .proto file and its C++ and Python libraries.

    Args:
      name: stem of the targets' names; the .proto file's own stem.
      src: the .proto file.
      deps: names of other meshnet_proto targets, and `@protobuf//:NAME_proto` for the well-known ones.
      grpc: whether the file declares services.
      visibility: of all the targets.
    """
    ours = [dep for dep in deps if not dep.startswith("@")]
    proto_library(
        name = name + "_proto",
        srcs = [src],
        visibility = visibility,
        deps = [_with_suffix(dep, "_proto") for dep in ours] + [dep for dep in deps if dep.startswith("@")],
    )
    cc_proto_library(
        name = name + "_cc_proto",
        visibility = visibility,
        deps = [":" + name + "_proto"],
    )
    if grpc:
        _cc_grpc_sources(
            name = name + "_cc_grpc_sources",
            proto = ":" + name + "_proto",
            visibility = ["//visibility:private"],
        )
        for group in ["hdrs", "srcs"]:
            native.filegroup(
                name = name + "_cc_grpc_" + group,
                srcs = [":" + name + "_cc_grpc_sources"],
                output_group = group,
                visibility = ["//visibility:private"],
            )
        cc_library(
            name = name + "_cc_grpc",
            srcs = [":" + name + "_cc_grpc_srcs"],
            hdrs = [":" + name + "_cc_grpc_hdrs"],
            visibility = visibility,
            deps = [
                ":" + name + "_cc_proto",
                Label("@grpc//:grpc++"),
            ],
        )
    _py_sources(
        name = name + "_py_sources",
        grpc = grpc,
        proto = ":" + name + "_proto",
        visibility = ["//visibility:private"],
    )
    native.filegroup(
        name = name + "_pyi",
        srcs = [":" + name + "_py_sources"],
        output_group = "pyi",
        visibility = ["//visibility:private"],
    )
    py_library(
        name = name + "_py",
        srcs = [":" + name + "_py_sources"],
        data = [":" + name + "_pyi"],
        visibility = visibility,
        deps = [_with_suffix(dep, "_py") for dep in ours] + [Label("@pypi//protobuf")] +
               ([Label("@pypi//grpcio")] if grpc else []),
    )
