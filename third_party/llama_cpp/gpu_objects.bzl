"""ggml's CUDA sources as object files, by NVIDIA's compiler or, as HIP, by clang for AMD's GPUs.

    gpu_objects(name = "ggml_cuda_objects", srcs = glob(["*.cu"]), lane = "cuda", ...)
    cc_library(name = "ggml_cuda", srcs = [":ggml_cuda_objects"], ...)

Which GPUs the code is for is the build's choice:

    tools/bazel build --config=cuda //cc/worker                                        # one, for development
    tools/bazel build --config=cuda --//platforms:gpu_architectures=release //cc/worker       # all that are released
    tools/bazel build --config=cuda --//platforms:gpu_architectures=sm_90,compute_120 //cc/worker
"""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

# sm_N is machine code for one GPU, compute_N a program that the driver compiles for that and later ones. Those of the
# release are upstream's choice for CUDA 13.
_ARCHITECTURES = {
    "cuda": {
        "development": ["compute_80"],
        "release": ["compute_75", "compute_80", "sm_86", "sm_89", "compute_90", "sm_120a", "sm_121a"],
    },
    "rocm": {
        "development": ["gfx1100"],
        "release": ["gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"],
    },
}

def _architectures(ctx):
    chosen = ctx.attr._architectures[BuildSettingInfo].value
    return _ARCHITECTURES[ctx.attr.lane].get(chosen) or chosen.split(",")

def _cuda_code(name):
    number = name.split("_")[-1]
    return "-gencode=arch=compute_%s,code=%s" % (number, name)

def _include_flags(context):
    return (["-I" + path for path in context.includes.to_list() + context.quote_includes.to_list()] +
            ["-I" + path for path in context.system_includes.to_list()])

def _nvcc_arguments(ctx, toolchain, source):
    host = ["--sysroot=%s" % toolchain.sysroot, "-B/usr/bin", "-fno-omit-frame-pointer", "-ffunction-sections", "-w"]
    return [
        "-ccbin",
        toolchain.compiler_executable,
        "-std=c++17",
        "-O3",
        "-use_fast_math",
        "-extended-lambda",
        "-compress-mode=size",
        # Names of variables would otherwise be made of the process's number.
        "-frandom-seed=" + source.basename,
        "-Xcompiler",
        ",".join(host),
        "-Xcudafe",
        "--display_error_number",
        "-w",
    ] + ["-I%s/include/cccl" % ctx.executable.compiler.dirname.removesuffix("/bin")] + [
        _cuda_code(name)
        for name in _architectures(ctx)
    ]

def _hip_arguments(ctx, toolchain, _source):
    sdk = ctx.executable.compiler.path.split("/usr/")[0] + "/usr"
    return [
        "-x",
        "hip",
        "-std=c++17",
        "-O3",
        "-w",
        "-fuse-ld=lld",
        "-fPIC",
        "-fno-omit-frame-pointer",
        "-ffunction-sections",
        "--sysroot=%s" % toolchain.sysroot,
        "--gcc-install-dir=%s/usr/lib/gcc/x86_64-linux-gnu/12" % toolchain.sysroot,
        "--rocm-path=" + sdk,
        "--rocm-device-lib-path=%s/lib/llvm-21/lib/clang/21/amdgcn/bitcode" % sdk,
        "-isystem",
        sdk + "/include",
    ] + ["--offload-arch=" + name for name in _architectures(ctx)]

def _gpu_objects_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    inputs = depset(
        ctx.files.hdrs + ctx.files.compiler_files,
        transitive = [context.headers, toolchain.all_files],
    )
    make = {"cuda": _nvcc_arguments, "rocm": _hip_arguments}[ctx.attr.lane]
    objects = []
    for source in ctx.files.srcs:
        object = ctx.actions.declare_file("%s/%s.o" % (ctx.label.name, source.basename.removesuffix(".cu")))
        objects.append(object)
        ctx.actions.run(
            executable = ctx.executable.compiler,
            arguments = make(ctx, toolchain, source) + ["-D" + name for name in ctx.attr.local_defines] +
                        _include_flags(context) + ["-c", source.path, "-o", object.path],
            inputs = depset([source], transitive = [inputs]),
            outputs = [object],
            env = {
                "LD_LIBRARY_PATH": ctx.executable.compiler.path.split("/lib/llvm-")[0] + "/lib/x86_64-linux-gnu" if ctx.attr.lane == "rocm" else "",
                "PATH": "/usr/bin:/bin",
                "TMPDIR": "/tmp",
            },
            mnemonic = "GpuCompile",
            progress_message = "Compiling %s for %s" % (source.basename, ctx.attr.lane),
        )
    return [DefaultInfo(files = depset(objects))]

def _accelerator_options_impl(ctx):
    options = ["-D" + name for name in ctx.attr.local_defines]
    if ctx.attr.lane in _ARCHITECTURES:
        options = ["-O3"] + (["-use_fast_math"] if ctx.attr.lane == "cuda" else []) + options + _architectures(ctx)
    ctx.actions.run_shell(
        inputs = [ctx.file.sdk_version],
        outputs = [ctx.outputs.out],
        command = """printf '#pragma once\n\nnamespace meshnet::llama_cpp {\n%s"%s %s";\n}\n' "$1" "$(cat "$2")" "$3" >"$4" """,
        arguments = [
            "inline constexpr char kAcceleratorOptions[] = ",
            ctx.file.sdk_version.path,
            " ".join(options),
            ctx.outputs.out.path,
        ],
        mnemonic = "AcceleratorOptions",
    )
    return [DefaultInfo(files = depset([ctx.outputs.out]))]

accelerator_options = rule(
    implementation = _accelerator_options_impl,
    attrs = {
        "lane": attr.string(mandatory = True),
        "local_defines": attr.string_list(),
        "out": attr.output(mandatory = True),
        "sdk_version": attr.label(mandatory = True, allow_single_file = True),
        "_architectures": attr.label(default = Label("//platforms:gpu_architectures")),
    },
    doc = "A header with the SDK, the flags and the GPUs of an accelerator's kernels, which are part of recipes.",
)

gpu_objects = rule(
    implementation = _gpu_objects_impl,
    attrs = {
        "compiler": attr.label(mandatory = True, executable = True, allow_single_file = True, cfg = "exec"),
        "compiler_files": attr.label(mandatory = True, cfg = "exec", doc = "All that the compiler reads of its SDK."),
        "deps": attr.label_list(providers = [CcInfo], doc = "Libraries whose headers are included."),
        "hdrs": attr.label_list(allow_files = True),
        "lane": attr.string(mandatory = True, values = ["cuda", "rocm"]),
        "local_defines": attr.string_list(),
        "srcs": attr.label_list(mandatory = True, allow_files = [".cu"]),
        "_architectures": attr.label(default = Label("//platforms:gpu_architectures")),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
    },
    fragments = ["cpp"],
    toolchains = use_cpp_toolchain(),
    doc = "One object file per source.",
)
