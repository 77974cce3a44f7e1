"""ggml's Vulkan shaders as C++ sources: one action a shader, so that they are compiled side by side and cached.

Upstream's generator calls the shader compiler for every variant of a shader and writes their bytes into a C++ file, from
where they go into an object file.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")

def _vulkan_shaders_impl(ctx):
    header = ctx.actions.declare_file("%s/ggml-vulkan-shaders.hpp" % ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable.generator,
        arguments = ["--output-dir", header.dirname, "--target-hpp", header.path],
        outputs = [header],
        mnemonic = "VulkanShaderNames",
    )
    libraries = ctx.files.glslc_libraries
    toolchain = find_cpp_toolchain(ctx)
    sources = []
    for shader in ctx.files.srcs:
        source = ctx.actions.declare_file("%s/%s.cpp" % (ctx.label.name, shader.basename))
        rest = ctx.actions.declare_file("%s/%s.rest.cpp" % (ctx.label.name, shader.basename))
        object = ctx.actions.declare_file("%s/%s.o" % (ctx.label.name, shader.basename))
        sources.extend([rest, object])
        ctx.actions.run_shell(
            # The generator wants a place for the compiled variants, which nobody needs afterwards.
            command = 'spirv=$(mktemp -d) && "$@" --output-dir "$spirv" && rm -rf "$spirv" "$SOURCE.d"',
            arguments = [
                ctx.executable.generator.path,
                "--glslc",
                ctx.executable.glslc.path,
                "--source",
                shader.path,
                "--target-hpp",
                header.basename,
                "--target-cpp",
                source.path,
            ],
            inputs = depset([shader] + ctx.files.includes + libraries),
            outputs = [source],
            tools = [
                ctx.attr.generator[DefaultInfo].files_to_run,
                ctx.attr.glslc[DefaultInfo].files_to_run,
            ],
            env = {
                "LD_LIBRARY_PATH": libraries[0].dirname if libraries else "",
                "PATH": "/usr/bin:/bin",
                "SOURCE": source.path,
            },
            mnemonic = "VulkanShader",
            progress_message = "Compiling Vulkan shader " + shader.basename,
        )
        ctx.actions.run(
            executable = ctx.executable._embed,
            arguments = ["--source", source.path, "--rest", rest.path, "--object", object.path, "--"] +
                        [toolchain.compiler_executable, "--sysroot=%s" % toolchain.sysroot, "-B/usr/bin"],
            inputs = depset([source], transitive = [toolchain.all_files]),
            outputs = [rest, object],
            env = {"PATH": "/usr/bin:/bin"},
            mnemonic = "EmbedVulkanShader",
            progress_message = "Embedding Vulkan shader " + shader.basename,
        )
    return [DefaultInfo(files = depset([header] + sources))]

vulkan_shaders = rule(
    implementation = _vulkan_shaders_impl,
    attrs = {
        "generator": attr.label(mandatory = True, executable = True, cfg = "exec", doc = "Upstream's vulkan-shaders-gen."),
        "glslc": attr.label(mandatory = True, executable = True, allow_single_file = True, cfg = "exec"),
        "glslc_libraries": attr.label(mandatory = True, cfg = "exec", doc = "Shared libraries of glslc, in one folder."),
        "includes": attr.label_list(allow_files = True, doc = "What shaders include."),
        "srcs": attr.label_list(mandatory = True, allow_files = [".comp"]),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
        "_embed": attr.label(default = Label("//third_party/llama_cpp:embed_spirv"), executable = True, cfg = "exec"),
    },
    doc = "The variants of each shader in an object file, its tables as C++, and the header with all names.",
    fragments = ["cpp"],
    toolchains = use_cpp_toolchain(),
)
