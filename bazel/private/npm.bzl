"""Packages of npm, for repository rules."""

def npm_package(repository_ctx, name, version, integrity):
    """Unpacks a package of npm into the repository.

    Args:
      repository_ctx: of the rule.
      name: the package's, with its scope.
      version: the package's.
      integrity: its dist.integrity, which what is fetched must have.
    """
    npm = repository_ctx.which("npm")
    if not npm:
        fail("%s comes from npm, and there is no npm on the PATH: install it (Debian: apt-get install npm)" % name)
    cache = repository_ctx.getenv("MESHNET_CACHE")
    repository_ctx.report_progress("npm pack %s@%s" % (name, version))
    result = repository_ctx.execute(
        [npm, "pack", "--silent", "%s@%s" % (name, version)],
        environment = {"npm_config_cache": cache + "/npm"} if cache else {},
    )
    if result.return_code:
        fail("npm pack %s@%s failed:\n%s%s" % (name, version, result.stdout, result.stderr))
    archive = "%s-%s.tgz" % (name.removeprefix("@").replace("/", "-"), version)

    # Fetching from the local file checks the integrity and unpacks.
    repository_ctx.download_and_extract(
        url = "file://" + str(repository_ctx.path(archive)),
        integrity = integrity,
        stripPrefix = "package",
    )
    repository_ctx.delete(archive)
