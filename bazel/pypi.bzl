"""Python packages from a hashed lock, as the repository `@pypi`.

Each locked package is `@pypi//NAME` (a py_library), as with rules_python's pip.parse, whose place a newer rules_python in
the build root could take (the one that is there cannot run its pip tools on Python 3.14).
"""

def _pypi_repository_impl(repository_ctx):
    python = repository_ctx.which("python3")
    if not python:
        fail("no python3 on the PATH")
    requirements = repository_ctx.path(repository_ctx.attr.requirements)
    installer = repository_ctx.path(repository_ctx.attr._installer)
    cache = repository_ctx.getenv("MESHNET_CACHE")
    repository_ctx.report_progress("pip install (%s)" % requirements.basename)
    result = repository_ctx.execute(
        [python, installer, "--requirements", requirements, "--out", repository_ctx.path(".")],
        environment = {"PIP_CACHE_DIR": cache + "/pip"} if cache else {},
        timeout = 1800,
    )
    if result.return_code:
        fail("the locked Python packages could not be installed:\n%s%s" % (result.stdout, result.stderr))

pypi_repository = repository_rule(
    implementation = _pypi_repository_impl,
    attrs = {
        "requirements": attr.label(mandatory = True, doc = "The lock: pinned versions with hashes."),
        "_installer": attr.label(default = "//bazel/private:pypi_install.py"),
    },
    environ = ["MESHNET_BUILD_ROOT_KEY"],
    doc = "Installs all packages of a lock, each into a folder of its own.",
)

def _pypi_impl(module_ctx):
    for module in module_ctx.modules:
        for lock in module.tags.lock:
            pypi_repository(name = lock.name, requirements = lock.requirements)

_lock = tag_class(attrs = {
    "name": attr.string(mandatory = True, doc = "Name of the repository."),
    "requirements": attr.label(mandatory = True, doc = "The lock file."),
})

pypi = module_extension(
    implementation = _pypi_impl,
    tag_classes = {"lock": _lock},
)
