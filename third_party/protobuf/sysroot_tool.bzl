"""Runs a program of the sysroot from the build root."""

def _sysroot_tool_impl(ctx):
    script = ctx.actions.declare_file(ctx.label.name)

    # The program's libraries are the sysroot's; its libc is the build root's, which is newer.
    ctx.actions.write(
        output = script,
        is_executable = True,
        content = "#!/bin/sh\nLD_LIBRARY_PATH=/opt/sysroot/usr/lib/x86_64-linux-gnu exec /opt/sysroot/usr/bin/%s \"$@\"\n" % ctx.attr.program,
    )
    return [DefaultInfo(executable = script, files = depset([script]))]

sysroot_tool = rule(
    implementation = _sysroot_tool_impl,
    attrs = {"program": attr.string(mandatory = True, doc = "Name in the sysroot's /usr/bin.")},
    executable = True,
    doc = "An executable that runs a program of the sysroot with the sysroot's libraries.",
)
