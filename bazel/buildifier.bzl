"""buildifier from its npm package, which ships the binaries."""

load("//bazel/private:npm.bzl", "npm_package")

def _buildifier_repository_impl(repository_ctx):
    npm_package(repository_ctx, "@bazel/buildifier", repository_ctx.attr.version, repository_ctx.attr.integrity)
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
