"""Repositories of the SDKs of accelerators and of aarch64 Linux, fetched when they are asked for.

    sdk_repository = use_repo_rule("//third_party/sdk:repository.bzl", "sdk_repository")

    sdk_repository(
        name = "vulkan_sdk",
        build_file = "//third_party/sdk:vulkan.BUILD",
        packages = "//tools/buildroot:vulkan-packages.txt",
    )

An SDK that is not there is no failure of the fetch: its targets exist and are incompatible with every platform, by a
constraint whose name is the reason. MISSING of installed.bzl is the reason, empty where the SDK is there. So `tools/bazel build --config=LANE //cc/worker` says what is missing.
"""

def _unavailable(repository_ctx, reason, targets):
    lines = [
        'package(default_visibility = ["//visibility:public"])',
        'constraint_setting(name = "reason")',
        'constraint_value(name = "%s", constraint_setting = ":reason")' % reason,
        'alias(name = "sdk", actual = ":%s")' % reason,
    ]
    lines.extend([
        'filegroup(name = "%s", target_compatible_with = [":%s"])' % (target, reason)
        for target in targets
    ])
    repository_ctx.file("BUILD.bazel", "\n".join(lines) + "\n")

def _debian_sdk(repository_ctx, name):
    """Makes the SDK available, or says why it is not."""
    cache = repository_ctx.getenv("MESHNET_CACHE")
    key = repository_ctx.getenv("MESHNET_BUILD_ROOT_KEY")
    if not cache or not key:
        return "the_%s_sdk_comes_with_the_build_root__leave_out_config_host" % name
    profile = repository_ctx.path("%s/sdk/%s/%s" % (cache, key, name))

    # Installed, replaced or removed later: look again.
    repository_ctx.watch(profile.get_child("packages.txt"))
    repository_ctx.watch(repository_ctx.attr.packages)
    if not profile.get_child("packages.txt").exists:
        return "the_%s_sdk_is_not_installed__run__tools_sdk_install_%s" % (name, name)
    if repository_ctx.read(profile.get_child("packages.txt")) != repository_ctx.read(repository_ctx.attr.packages):
        return "the_%s_sdk_is_of_another_list_of_packages__run__tools_sdk_install_%s" % (name, name)
    repository_ctx.symlink(profile.get_child("usr"), "usr")
    if profile.get_child("etc").exists:
        repository_ctx.symlink(profile.get_child("etc"), "etc")
    versions = json.decode(repository_ctx.read(profile.get_child("versions.json")))
    repository_ctx.file("version.txt", ", ".join([
        "%s %s" % (package, versions[package])
        for package in repository_ctx.attr.compilers
    ]) + "\n")
    return None

def _sdk_repository_impl(repository_ctx):
    name = repository_ctx.attr.name.split("~")[-1].removesuffix("_sdk")
    if repository_ctx.attr.packages:
        reason = _debian_sdk(repository_ctx, name)
    elif repository_ctx.os.name.startswith("mac"):
        reason = None if repository_ctx.which("xcrun") else "the_metal_sdk_is_part_of_xcode__install_it"
    else:
        reason = "the_metal_sdk_is_part_of_xcode__build_on_macos"
    repository_ctx.file("installed.bzl", "MISSING = %r\n" % (reason or ""))
    if reason:
        _unavailable(repository_ctx, reason, repository_ctx.attr.targets)
    else:
        if not repository_ctx.attr.packages:
            xcode = repository_ctx.execute(["xcodebuild", "-version"])
            repository_ctx.file("version.txt", ", ".join(xcode.stdout.strip().split("\n")) + "\n")
        repository_ctx.symlink(repository_ctx.attr.build_file, "BUILD.bazel")

sdk_repository = repository_rule(
    implementation = _sdk_repository_impl,
    attrs = {
        "build_file": attr.label(mandatory = True, allow_single_file = True, doc = "BUILD file where the SDK is there."),
        "compilers": attr.string_list(doc = "Packages whose versions tell what the kernels are made with: version.txt."),
        "packages": attr.label(allow_single_file = True, doc = "The list of Debian packages that tools/sdk installs; none for Xcode."),
        "targets": attr.string_list(doc = "What else the BUILD file declares, besides `sdk`."),
    },
)
