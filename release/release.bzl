"""Rules of what we hand out.

    load("//release:release.bzl", "licence_texts", "refusal", "wheel_list")
"""

def _refusal_impl(ctx):
    fail("there is no release for this platform here: " + ctx.attr.reason)

refusal = rule(
    implementation = _refusal_impl,
    attrs = {"reason": attr.string(mandatory = True)},
    doc = "Fails, and says why, when somebody asks for it.",
)

def _wheel_list_impl(ctx):
    transitive = []
    for dep in ctx.attr.deps:
        transitive.append(dep[DefaultInfo].default_runfiles.files)
    files = {}
    for file in depset(transitive = transitive).to_list():
        path = file.short_path
        wanted = [prefix for prefix in ctx.attr.prefixes if path.startswith(prefix)]

        # What has no extension starts a py_binary.
        if wanted and file.extension and not file.is_directory:
            files[path] = file
    out = ctx.actions.declare_file(ctx.label.name + ".txt")
    ctx.actions.write(out, "".join(["%s\t%s\n" % (path, files[path].path) for path in sorted(files)]))
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles(files.values())), OutputGroupInfo(content = depset(files.values()))]

wheel_list = rule(
    implementation = _wheel_list_impl,
    attrs = {
        "deps": attr.label_list(mandatory = True, doc = "Python libraries."),
        "prefixes": attr.string_list(mandatory = True, doc = "What of their runfiles belongs into the wheel."),
    },
    doc = "The files of a wheel: one line a file, its path in the tree and where it lies. Group `content` holds the files.",
)

def _licence_texts_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    args = ctx.actions.args()
    args.add("--deps", ctx.file.deps_yaml)
    args.add("--lane", ctx.attr.lane)
    args.add("--out", out.path)
    args.add_all(["%s=%s" % (name, file.path) for file, name in [(target.files.to_list()[0], name) for target, name in ctx.attr.more.items()]])
    ctx.actions.run(
        executable = ctx.executable._tool,
        arguments = [args],
        inputs = [ctx.file.deps_yaml] + ctx.files.more,
        outputs = [out],
        mnemonic = "LicenceTexts",
    )
    return [DefaultInfo(files = depset([out]))]

licence_texts = rule(
    implementation = _licence_texts_impl,
    attrs = {
        "deps_yaml": attr.label(mandatory = True, allow_single_file = True),
        "lane": attr.string(mandatory = True),
        "more": attr.label_keyed_string_dict(allow_files = True, doc = "Further texts, and their names."),
        "_tool": attr.label(default = "//release:licences", executable = True, cfg = "exec"),
    },
    doc = """The licences' texts of what is linked into programs, as a folder.

Debian's are in the sysroot, which the key of the build root in every action's environment stands for.""",
)
