"""A zsh for tests, from the Debian packages of the machine that builds: in the build root of its own suite.

apt checks them with Debian's keys. Nothing of it goes into what we hand out, and it is no part of the build root, whose
key would change with it.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files(["zsh"])

filegroup(
    name = "functions",
    srcs = glob(["functions/**"]),
)
"""

# Of the functions that complete command lines, those that any command's do with.
_FUNCTIONS = ["Base", "Unix/_files", "Unix/_path_files", "Zsh", "compaudit", "compdump", "compinit", "compinstall"]

def _run(repository_ctx, command, what):
    result = repository_ctx.execute(command)
    if result.return_code:
        fail("%s:\n%s%s" % (what, result.stdout, result.stderr))

def _zsh_repository_impl(repository_ctx):
    apt = repository_ctx.which("apt-get")
    if not apt:
        fail("zsh comes from Debian, and there is no apt-get on the PATH")

    # Lists and packages of this repository alone: the machine's own stay as they are.
    for folder in ("lists/partial", "archives/partial"):
        repository_ctx.execute(["mkdir", "-p", "apt/" + folder])
    here = str(repository_ctx.path("apt"))
    apt = [apt, "--quiet", "-o", "Debug::NoLocking=1"]
    for setting, value in {
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Dir::Cache": here,
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Dir::State": here,
    }.items():
        apt.extend(["-o", "%s=%s" % (setting, value)])
    repository_ctx.report_progress("fetching Debian's lists of packages")
    _run(repository_ctx, apt + ["update"], "apt-get update failed")
    repository_ctx.report_progress("fetching zsh")
    packages = repository_ctx.attr.packages
    _run(repository_ctx, apt + ["download"] + packages, "apt-get download %s failed" % " ".join(packages))
    for file in repository_ctx.path(".").readdir():
        if file.basename.endswith(".deb"):
            _run(repository_ctx, ["dpkg-deb", "--extract", file, "tree"], "%s could not be unpacked" % file.basename)
            repository_ctx.delete(file)
    repository_ctx.execute(["mkdir", "functions"])
    functions = ["tree/usr/share/zsh/functions/Completion/" + name for name in _FUNCTIONS]
    _run(repository_ctx, ["mv"] + functions + ["functions"], "expected zsh's functions in its packages")
    _run(repository_ctx, ["mv", "tree/usr/bin/zsh-static", "zsh"], "expected zsh in its packages")
    for unneeded in ("apt", "tree"):
        repository_ctx.delete(unneeded)
    repository_ctx.file("BUILD.bazel", _BUILD)

zsh_repository = repository_rule(
    implementation = _zsh_repository_impl,
    attrs = {
        "packages": attr.string_list(mandatory = True, doc = "The Debian packages of the program, linked statically, and of its functions."),
    },
    doc = "Makes @NAME//:zsh, the program, and @NAME//:functions, its functions that complete command lines.",
)
