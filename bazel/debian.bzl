"""Programs for tests, from the Debian packages of the machine that builds: in the build root of its own suite.

    debian_repository = use_repo_rule("//bazel:debian.bzl", "debian_repository")

    debian_repository(
        name = "nginx",
        files = {"nginx": "usr/sbin/nginx"},
        packages = ["nginx"],
    )

apt checks them with Debian's keys. Nothing of them goes into what we hand out, and they are no part of the build root,
whose key would change with them.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files(%s)
"""

_FOLDER = """
filegroup(
    name = "%s",
    srcs = glob(["%s/**"]),
)
"""

def _run(repository_ctx, command, what):
    result = repository_ctx.execute(command)
    if result.return_code:
        fail("%s:\n%s%s" % (what, result.stdout, result.stderr))

def _debian_repository_impl(repository_ctx):
    apt = repository_ctx.which("apt-get")
    if not apt:
        fail("@%s comes from Debian, and there is no apt-get on the PATH" % repository_ctx.name)

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
    packages = repository_ctx.attr.packages
    repository_ctx.report_progress("fetching " + " ".join(packages))
    _run(repository_ctx, apt + ["download"] + packages, "apt-get download %s failed" % " ".join(packages))
    for file in repository_ctx.path(".").readdir():
        if file.basename.endswith(".deb"):
            _run(repository_ctx, ["dpkg-deb", "--extract", file, "tree"], "%s could not be unpacked" % file.basename)
            repository_ctx.delete(file)
    folders = {}
    for name, source in repository_ctx.attr.files.items():
        folder, is_below, _ = name.rpartition("/")
        if is_below:
            folders[name.split("/")[0]] = None
            repository_ctx.execute(["mkdir", "-p", folder])
        _run(repository_ctx, ["mv", "tree/" + source, name], "expected %s in %s" % (source, " ".join(packages)))
    for unneeded in ("apt", "tree"):
        repository_ctx.delete(unneeded)
    programs = [name for name in repository_ctx.attr.files if "/" not in name]
    build = [_BUILD % repr(programs)] + [_FOLDER % (name, name) for name in folders]
    repository_ctx.file("BUILD.bazel", "".join(build))

debian_repository = repository_rule(
    implementation = _debian_repository_impl,
    attrs = {
        "files": attr.string_dict(mandatory = True, doc = "Name here -> file or folder in the packages."),
        "packages": attr.string_list(mandatory = True, doc = "The Debian packages."),
    },
    doc = "Makes @NAME//:FILE of each file, and of files below FOLDER/ @NAME//:FOLDER.",
)
