"""@cuda_sdk: NVIDIA's SDK from PyPI, by hash, when the cuda lane is asked for."""

# Wheels of one toolkit share one folder. pip leaves programs without their executable bit.
_FINISH = """
import pathlib, shutil, sys
made = pathlib.Path("wheels/nvidia/cu13")
for program in [*made.glob("bin/*"), *made.glob("nvvm/bin/*")]:
    if program.is_file():
        program.chmod(0o755)
shutil.move(made, "cuda")
(terms,) = pathlib.Path("wheels").glob("nvidia_cuda_runtime-*.dist-info/**/License.txt")
shutil.move(terms, "licence.txt")
shutil.rmtree("wheels")
"""

def _cuda_repository_impl(repository_ctx):
    python = repository_ctx.which("python3")
    if not python:
        fail("the CUDA SDK comes from PyPI, and there is no python3 on the PATH")
    repository_ctx.report_progress("pip install (CUDA, 530 MB)")
    result = repository_ctx.execute(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"] +
        ["--only-binary=:all:", "--no-compile", "--no-cache-dir", "--target=wheels"] +
        ["--requirement", repository_ctx.path(repository_ctx.attr.lock)],
        timeout = 1800,
    )
    if result.return_code:
        fail("the CUDA SDK is unavailable, its packages could not be fetched:\n%s%s" % (result.stdout, result.stderr))
    result = repository_ctx.execute([python, "-c", _FINISH])
    if result.return_code:
        fail("the CUDA SDK's packages hold something else than expected:\n" + result.stderr)
    repository_ctx.file("version.txt", ", ".join([
        line.split(" ")[0].replace("==", " ")
        for line in repository_ctx.read(repository_ctx.attr.lock).split("\n")
        if line and not line.startswith("#")
    ]) + "\n")
    repository_ctx.symlink(repository_ctx.attr.build_file, "BUILD.bazel")

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    attrs = {
        "build_file": attr.label(mandatory = True, allow_single_file = True),
        "lock": attr.label(mandatory = True, allow_single_file = True, doc = "Packages with versions and hashes."),
    },
)
