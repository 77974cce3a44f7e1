"""buildifier from its npm package, which ships the binaries."""

def _buildifier_repository_impl(repository_ctx):
    version = repository_ctx.attr.version
    npm = repository_ctx.which("npm")
    if not npm:
        fail("buildifier comes from npm, and there is no npm on the PATH: install it (Debian: apt-get install npm)")
    cache = repository_ctx.getenv("MESHNET_CACHE")
    repository_ctx.report_progress("npm pack @bazel/buildifier@" + version)
    result = repository_ctx.execute(
        [npm, "pack", "--silent", "@bazel/buildifier@" + version],
        environment = {"npm_config_cache": cache + "/npm"} if cache else {},
    )
    if result.return_code:
        fail("npm pack @bazel/buildifier@%s failed:\n%s%s" % (version, result.stdout, result.stderr))
    archive = "bazel-buildifier-%s.tgz" % version

    # Fetching from the local file checks the integrity and unpacks.
    repository_ctx.download_and_extract(
        url = "file://" + str(repository_ctx.path(archive)),
        integrity = repository_ctx.attr.integrity,
        stripPrefix = "package",
    )
    repository_ctx.delete(archive)
    system = "darwin" if repository_ctx.os.name.startswith("mac") else "linux"
    machine = {"aarch64": "arm64", "x86_64": "amd64"}.get(repository_ctx.os.arch, repository_ctx.os.arch)
    repository_ctx.symlink("buildifier-%s_%s" % (system, machine), "buildifier")
    repository_ctx.file("BUILD.bazel", 'exports_files(["buildifier"])\n')

buildifier_repository = repository_rule(
    implementation = _buildifier_repository_impl,
    attrs = {
        "integrity": attr.string(mandatory = True, doc = "The package's dist.integrity."),
        "version": attr.string(mandatory = True, doc = "Version of @bazel/buildifier."),
    },
    doc = "Makes @NAME//:buildifier.",
)
