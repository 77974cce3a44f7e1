"""The repository rule of @llama_cpp: the pinned source, verified, with the patch stack applied."""

_SOURCES = [
    "__init__.py",
    "__main__.py",
    "archive.py",
    "cli.py",
    "diff.py",
    "errors.py",
    "fetch.py",
    "git_tree.py",
    "manifest.py",
    "patch_stack.py",
    "regenerate.py",
]

def _tool(repository_ctx, root, arguments):
    """Runs tools/llama_cpp's program and returns the object that it prints."""
    python = repository_ctx.which("python3")
    if not python:
        fail("@llama_cpp needs python3 (3.11 or newer) on the PATH")
    environment = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ["MESHNET_CACHE", "MESHNET_LLAMA_CPP_SOURCE"]:
        value = repository_ctx.getenv(name)
        if value:
            environment[name] = value
    result = repository_ctx.execute(
        [python, "-m", "third_party.llama_cpp.llama_source", "--json"] + arguments,
        environment = environment,
        timeout = 1800,
    )
    if result.return_code:
        fail("llama.cpp's source was refused or could not be fetched:\n" + result.stderr)
    return json.decode(result.stdout)

def _llama_cpp_repository_impl(repository_ctx):
    root = repository_ctx.path(Label("//:MODULE.bazel")).dirname
    folder = root.get_child("third_party").get_child("llama_cpp")

    # Every file that decides what is fetched makes the repository anew when it changes.
    for name in ["manifest.json", "pinned_tree.txt"]:
        repository_ctx.watch(folder.get_child(name))
    for name in _SOURCES:
        repository_ctx.watch(folder.get_child("llama_source").get_child(name))
    patches = [repository_ctx.path(patch) for patch in repository_ctx.attr.patches]
    for patch in patches:
        repository_ctx.watch(patch)
    series = root.get_child("patches").get_child("llama_cpp").get_child("series")
    repository_ctx.watch(series)

    # The list in MODULE.bazel is what a reader sees, the series is what the tool applies: they must agree.
    identity = _tool(repository_ctx, root, ["identity"])
    declared = [patch.basename for patch in patches]
    if declared != identity["patches"]:
        fail("MODULE.bazel lists other patches of llama.cpp than patches/llama_cpp/series:\n  MODULE.bazel: %s\n  series: %s" % (
            ", ".join(declared),
            ", ".join(identity["patches"]),
        ))

    repository_ctx.report_progress("fetching and verifying llama.cpp %s" % identity["release"])
    fetched = _tool(repository_ctx, root, ["fetch", "--patched", "source"])
    identity["patched_tree"] = fetched["patched_tree"]

    version = identity["release"].removeprefix("v")
    ggml = {}
    for line in repository_ctx.read("source/ggml/CMakeLists.txt").split("\n"):
        for part in ["MAJOR", "MINOR", "PATCH"]:
            prefix = "set(GGML_VERSION_%s " % part
            if line.startswith(prefix):
                ggml[part] = line.removeprefix(prefix).rstrip(")")
    repository_ctx.file("generated/llama-version.h", """\
#pragma once

#define LLAMA_VERSION "%s"
#define LLAMA_COMMIT "%s"
""" % (version, identity["commit"]))
    repository_ctx.file("generated/ggml-version.h", """\
#pragma once

#define GGML_VERSION "%s.%s.%s"
#define GGML_COMMIT "%s"
""" % (ggml["MAJOR"], ggml["MINOR"], ggml["PATCH"], identity["commit"]))

    # 16 architectures a file, as upstream's own build does: half the time of one by one.
    models = sorted([
        file.basename
        for file in repository_ctx.path("source/src/models").readdir()
        if file.basename.endswith(".cpp")
    ])
    for index in range(0, len(models), 16):
        repository_ctx.file(
            "generated/models_%d.cpp" % (index // 16),
            "".join(["#include \"source/src/models/%s\"\n" % name for name in models[index:index + 16]]),
        )
    repository_ctx.file("identity/llama_cpp_identity.h", """\
#pragma once

namespace meshnet::llama_cpp {{

// What the build verified: see third_party/llama_cpp/manifest.json and patches/llama_cpp/series.
inline constexpr char kRelease[] = "{release}";
inline constexpr char kCommit[] = "{commit}";
inline constexpr char kTree[] = "{tree}";
inline constexpr char kPatchStackSha256[] = "{stack_sha256}";
inline constexpr char kPatchedTree[] = "{patched_tree}";

}}  // namespace meshnet::llama_cpp
""".format(**{key: value for key, value in identity.items() if type(value) == "string"}))
    repository_ctx.file("identity/identity.json", json.encode_indent(identity) + "\n")
    repository_ctx.symlink(repository_ctx.attr.build_file, "BUILD.bazel")

llama_cpp_repository = repository_rule(
    implementation = _llama_cpp_repository_impl,
    attrs = {
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "patches": attr.label_list(
            mandatory = True,
            allow_files = [".patch"],
            doc = "The patches in their order, as in patches/llama_cpp/series.",
        ),
    },
    doc = """Makes @llama_cpp: ggml and llama as libraries.

The source comes from MESHNET_LLAMA_CPP_SOURCE (a folder, archive or bundle), from the cache in MESHNET_CACHE, or by the
methods of third_party/llama_cpp/manifest.json in their order; whatever it comes from, it must be exactly the pinned git
tree before the patches are applied.""",
)
