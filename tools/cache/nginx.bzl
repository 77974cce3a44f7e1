"""The nginx that `tools/remote_cache get` has put into the cache folder, as @NAME//:nginx.

    nginx_repository = use_repo_rule("//tools/cache:nginx.bzl", "nginx_repository")

    nginx_repository(name = "nginx")

Where it is not there, what needs it is incompatible with every platform, by a constraint whose name is the reason.
"""

_FOUND = """\
exports_files(["nginx"], visibility = ["//visibility:public"])

alias(name = "there", actual = "@platforms//os:linux", visibility = ["//visibility:public"])
"""

_MISSING = """\
package(default_visibility = ["//visibility:public"])

constraint_setting(name = "reason")

constraint_value(name = "nginx_is_not_there__run__tools_remote_cache_get", constraint_setting = ":reason")

alias(name = "there", actual = ":nginx_is_not_there__run__tools_remote_cache_get")

filegroup(name = "nginx", target_compatible_with = [":there"])
"""

def _nginx_repository_impl(repository_ctx):
    cache = repository_ctx.getenv("MESHNET_CACHE")
    program = repository_ctx.path("%s/nginx/usr/sbin/nginx" % cache) if cache else None
    if program:
        repository_ctx.watch(program)
    if program and program.exists:
        repository_ctx.symlink(program, "nginx")
    repository_ctx.file("BUILD.bazel", _FOUND if program and program.exists else _MISSING)

nginx_repository = repository_rule(
    implementation = _nginx_repository_impl,
    doc = "Makes @NAME//:nginx, and @NAME//:there for target_compatible_with.",
)
