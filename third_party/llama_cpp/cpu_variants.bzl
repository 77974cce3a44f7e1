"""ggml's CPU backend, compiled several times, all of them in one program.

Each variant is compiled for another set of instructions. They define the same symbols, and templates of the standard
library in them too, so plain linking would mix code for different CPUs. Each variant is therefore linked into one object
in which only its entry point stays visible, under a name of its own.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

_V3 = ["-march=x86-64-v3"]

_AVX512 = _V3 + [
    "-mavx512f",
    "-mavx512cd",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bw",
]

_ICELAKE = _AVX512 + [
    "-mavx512vbmi",
    "-mavx512vnni",
]

_ZEN4 = _ICELAKE + ["-mavx512bf16"]

# Compiler flags with the names that upstream gives to the variants. From the plainest to the best.
# third_party/llama_cpp/cpu_backend_x86_64.cc tells which CPU can run which: change both.
CPU_VARIANTS = {
    "sse42": ["-march=x86-64-v2"],
    "haswell": _V3,
    "alderlake": _V3 + ["-mavxvnni"],
    "skylakex": _AVX512,
    "icelake": _ICELAKE,
    "zen4": _ZEN4,
    "sapphirerapids": _ZEN4 + [
        "-mamx-tile",
        "-mamx-int8",
    ],
}

# The same for aarch64, by the best instructions in it; cpu_backend_aarch64.cc tells which CPU can run which. None with
# SVE, unlike upstream's: its sums depend on the length of the CPU's vectors, which no recipe tells.
AARCH64_CPU_VARIANTS = {
    "armv8": ["-march=armv8-a"],
    "dotprod": ["-march=armv8.2-a+dotprod+fp16"],
    "i8mm": ["-march=armv8.2-a+dotprod+fp16+i8mm"],
}

# macOS runs on no CPU that lacks what Apple's first one has: one is enough, and there is nothing to keep apart.
_MACOS_VARIANT = "apple_m1"

_ENTRY = "ggml_backend_cpu_reg"

def _isolated_object_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    archives = []
    for linker_input in ctx.attr.library[CcInfo].linking_context.linker_inputs.to_list():
        if linker_input.owner != ctx.attr.library.label:
            continue
        for library in linker_input.libraries:
            archives.append(library.static_library or library.pic_static_library)
    if not archives:
        fail("%s has no static library" % ctx.attr.library.label)
    out = ctx.actions.declare_file(ctx.label.name + ".o")
    ctx.actions.run_shell(
        inputs = depset(archives, transitive = [toolchain.all_files]),
        outputs = [out],
        # Sections in COMDAT groups would be merged with those of other variants: take them out of their groups first.
        command = """\
set -eu
merged=$(mktemp)
"$LD" -r --force-group-allocation -o "$merged" --whole-archive "$@"
"$OBJCOPY" --keep-global-symbol="$ENTRY" "$merged"
"$OBJCOPY" --redefine-sym "$ENTRY=$NAME" "$merged" "$OUT"
rm -f "$merged"
# A static constructor would run on every CPU.
if "$OBJDUMP" --section-headers "$OUT" | grep -e init_array -e '[.]ctors' >&2; then
  echo "$NAME has static constructors" >&2
  exit 1
fi
""",
        arguments = [archive.path for archive in archives],
        env = {
            "ENTRY": _ENTRY,
            "LD": toolchain.ld_executable,
            "NAME": ctx.attr.entry,
            "OBJCOPY": toolchain.objcopy_executable,
            "OBJDUMP": toolchain.objdump_executable,
            "OUT": out.path,
            "PATH": "/usr/bin:/bin",
        },
        mnemonic = "IsolateObject",
        progress_message = "Isolating %{label}",
    )
    return [DefaultInfo(files = depset([out]))]

_isolated_object = rule(
    implementation = _isolated_object_impl,
    attrs = {
        "entry": attr.string(mandatory = True, doc = "The name that the entry point gets."),
        "library": attr.label(mandatory = True, providers = [CcInfo]),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
    },
    fragments = ["cpp"],
    toolchains = use_cpp_toolchain(),
)

def ggml_cpu_variants(name, srcs, aarch64_srcs, x86_64_srcs, copts, header_deps, deps, **kwargs):
    """A library with every variant of ggml's CPU backend; entry points are ggml_backend_cpu_reg_VARIANT.

    NAME_objects are the variants' isolated objects, NAME_VARIANT.o. On macOS NAME_macos is to be taken in its place.

    Args:
      name: name of the library.
      srcs: sources of one CPU backend.
      aarch64_srcs: those for aarch64 alone.
      x86_64_srcs: those for x86-64 alone.
      copts: compiler flags of all variants.
      header_deps: further libraries that the sources include headers of.
      deps: libraries that resolve what the sources call.
      **kwargs: as for cc_library.
    """
    objects = {}
    for cpu, variants, own_srcs in [
        ("aarch64", AARCH64_CPU_VARIANTS, aarch64_srcs),
        ("x86_64", CPU_VARIANTS, x86_64_srcs),
    ]:
        objects["@platforms//cpu:" + cpu] = [":%s_%s" % (name, variant) for variant in variants]
        for variant, flags in variants.items():
            cc_library(
                name = "%s_%s_plain" % (name, variant),
                srcs = srcs + own_srcs,
                # The rest of a program is tuned for one CPU (bazel/toolchain); kernels stand for many.
                copts = copts + ["-mtune=generic"] + flags,
                implementation_deps = header_deps,
                linkstatic = True,
                target_compatible_with = ["@platforms//cpu:" + cpu],
                visibility = ["//visibility:private"],
                deps = deps,
            )
            _isolated_object(
                name = "%s_%s" % (name, variant),
                entry = "%s_%s" % (_ENTRY, variant),
                library = ":%s_%s_plain" % (name, variant),
                target_compatible_with = ["@platforms//cpu:" + cpu],
                visibility = ["//visibility:private"],
            )
    native.filegroup(
        name = name + "_objects",
        srcs = select(objects),
        visibility = ["@@//cc/worker:__pkg__"],
    )
    cc_library(
        name = name,
        srcs = select(objects),
        deps = deps,
        linkstatic = True,
        **kwargs
    )
    cc_library(
        name = name + "_macos",
        srcs = srcs + aarch64_srcs,
        # clang knows no such flag.
        copts = [flag for flag in copts if flag != "-fno-gnu-unique"] + ["-mcpu=apple-m1"],
        implementation_deps = header_deps,
        linkstatic = True,
        local_defines = ["%s=%s_%s" % (_ENTRY, _ENTRY, _MACOS_VARIANT)],
        target_compatible_with = ["@platforms//os:macos"],
        deps = deps,
        **kwargs
    )
