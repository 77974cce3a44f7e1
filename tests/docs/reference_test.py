"""Every example of every command, as docs/reference.md and each --help show it, is run.

They stand below in an order in which each finds what it speaks of, with our own lines between them
that bring that about. An example that is missing here, or is none any more, fails the test.

It is a network of its own. What takes long is made short by settings in the environment; other
people's servers, and folders of the whole machine, are replaced.
"""

import asyncio
import datetime
import os
import pathlib
import shlex
import shutil
import time
from collections import Counter
from dataclasses import dataclass

from meshnet.signing import SigningKey
from meshnet.testing.postgres import PostgresServer
from meshnet_gguf.performance_contract import PerformanceContract, default_folder, lock
from meshnet_gguf.testing.empty_results import write_empty_results
from meshnet_gguf.testing.lane_contract import write_lane_contract
from meshnet_gguf.testing.pinned_storage import provide_model
from meshnet_gguf.testing.short_plan import write_short_plan

from tests.docs.blocks import Block, blocks_of, lines_of
from tests.docs.network import enter_network
from tests.docs.reader import Programs, Reader, installed

DOCUMENT = pathlib.Path(os.environ["DOCUMENT"])
MODEL, TINY, MESHNET, WORKER = (
    pathlib.Path(os.environ[name]).absolute()
    for name in ("MESHNET_TEST_MODEL", "TINY_MODEL", "MESHNET", "WORKER")
)
SPLIT = [pathlib.Path(path).absolute() for path in os.environ["SPLIT_MODEL"].split()]
# Before anything starts a thread.
enter_network("10.0.0.5", "10.0.0.6")

END = 800.0

# A terminal for a shell; what comes on stdin is typed.
TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["bash", "-c", sys.argv[1]])))
"""
# A question, and the end of the conversation.
TALK = "Hello\n\x04"


@dataclass(frozen=True)
class Step:
    """`how` is what a document says of a block; `settings` are for this line, NAME=VALUE.

    With `typed` it runs on a terminal, and somebody types that.
    """

    line: str
    how: str = ""
    settings: str = ""
    ours: bool = False
    typed: str = ""

    @property
    def text(self) -> str:
        """For a shell."""
        text = f"export {self.settings}\n{self.line}\n" if self.settings else f"{self.line}\n"
        if not self.typed:
            return text
        terminal = ["python3", "-c", TERMINAL, text]
        return f"printf %s {shlex.quote(self.typed)} | {shlex.join(terminal)}\n"


def ours(line: str, how: str = "", settings: str = "") -> Step:
    return Step(line, how, settings, ours=True)


SERVED = 'until "is served on"'
LISTENS = 'until "listening"'
READY = 'until "ready"'
LANE = "MESHNET_CERTIFY_CONTRACT=lane.v1.yaml"
MIXTURE = "MESHNET_CERTIFY_CONTRACT=mixture.v1.yaml"
# As `certify` starts them.
CERTIFIED = "--prefill_chunk_tokens=256 --rollback_tokens=64 --threads=1"

STEPS = [
    # Keys, certificates, files.
    Step("meshnet keys make certifier.pem"),
    Step("meshnet keys show certifier.pem.pub"),
    Step("meshnet certs init mesh-ca"),
    Step("meshnet certs issue mesh-ca worker-a --host=10.0.0.5"),
    Step("meshnet certs show mesh-ca/worker-a.pem", 'says "10.0.0.5"'),
    Step("meshnet certs rotate mesh-ca"),
    Step("meshnet certs retire mesh-ca"),
    ours("meshnet certs issue mesh-ca a --host=10.0.0.5"),
    ours("cp mesh-ca/a.pem mesh-ca/a.key mesh-ca/authorities.pem ."),
    Step("meshnet api-keys add keys.json alice --requests-per-minute 60", 'says "sk-meshnet-"'),
    Step("meshnet api-keys list keys.json", 'says "alice"'),
    Step("meshnet api-keys remove keys.json alice"),
    ours("mkdir -p ~/.local/share/bash-completion/completions ~/.zfunc"),
    Step("meshnet completion bash > ~/.local/share/bash-completion/completions/meshnet"),
    ours("bash -n ~/.local/share/bash-completion/completions/meshnet"),
    Step("meshnet completion zsh > ~/.zfunc/_meshnet"),
    ours("grep '#compdef meshnet' ~/.zfunc/_meshnet"),
    # Contracts.
    Step("meshnet contract check", 'says "alpha.v1"'),
    ours("sed 's/^version: 1$/version: 2/' alpha.v1.yaml >alpha.v2.yaml"),
    Step("meshnet contract lock alpha.v2.yaml", 'says "alpha.v2"'),
    Step('meshnet contract approve alpha.v1.yaml --key me.pem --by "Ada Lovelace"'),
    Step(
        "meshnet contract evaluate alpha.v1.yaml results.json --trusted-key me.pem.pub",
        'fails, says "optimize measured bottleneck"',
    ),
    # Models, and which machine takes what.
    Step("meshnet inspect model.gguf"),
    Step("meshnet inspect model.gguf --stages 4 --svg layers.svg"),
    ours("grep '<svg' layers.svg"),
    Step("meshnet inspect model-00001-of-00003.gguf --cuts 3,6 --json"),
    Step("meshnet manifest /srv/models/v4 --out v4.manifest.json"),
    Step(
        "meshnet manifest model.gguf --repository example/model-gguf --revision 60d8d70 "
        "> manifest.json"
    ),
    Step("meshnet manifest --show manifest.json", 'says "example/model-gguf"'),
    Step("meshnet plan --sample > machines.yaml"),
    Step("meshnet plan model.gguf --machines machines.yaml"),
    Step("meshnet plan model.gguf --machines machines.yaml --stages 2 --accept-slower"),
    Step(
        "meshnet plan model.gguf --machines machines.yaml "
        "--split berlin=0:12,paris=12:30 --accept-slower"
    ),
    ours("python3 -u -m http.server --bind 127.0.0.1 --directory web 8000", 'until "Serving"'),
    Step("meshnet provision manifest.json --from https://example.org/models/v4 --to /srv/models"),
    Step("meshnet provision manifest.json --from /mnt/models --layers 0:12"),
    Step(
        "meshnet provision manifest.json --from https://a.example/v4,/mnt/models --to /srv/models"
    ),
    ours("ln -sf tiny.gguf model.gguf; meshnet manifest model.gguf > manifest.json"),
    Step("meshnet inspect model.gguf --contract deepseek-v4-flash --manifest manifest.json --json"),
    ours("ln -sf models/llama.gguf model.gguf"),
    Step("meshnet evidence V4-00001-of-00004.gguf --stages 4 --record evidence.json"),
    Step("meshnet evidence tiny.gguf --contract deepseek4-tiny-fixture --record evidence.json"),
    # Lanes.
    Step(
        "meshnet certify smollm2 --model-id smollm2 --evidence lane.json",
        'fails, says "no trusted person has approved lane.v1"',
        LANE,
    ),
    Step(
        "meshnet certify --evidence lane.json --trusted-key approver.pem.pub "
        "--key certifier.pem --records lane.records",
        settings=LANE,
    ),
    Step("meshnet certification show lane.records --trusted-key certifier.pem.pub"),
    Step(
        "meshnet certify smollm2 --mixed --head-flag=--device=cpu --evidence mixture.json",
        'fails, says "expected a pinned model", says "no trusted person has approved mixture.v1"',
        MIXTURE,
    ),
    ours(
        "worker --model=tiny.gguf --layers=0:4 --listen=127.0.0.1:7001 --cpu_variant=sse42 "
        + CERTIFIED,
        READY,
    ),
    ours(f"worker --model=tiny.gguf --layers=4:8 --listen=127.0.0.1:7002 {CERTIFIED}", READY),
    Step(
        "meshnet certification check mixture.json --worker 127.0.0.1:7001,127.0.0.1:7002",
        settings="MESHNET_CERTIFICATION_CONTRACT=mixture.v1.yaml",
    ),
    # Workers.
    ours(
        f"worker --model=model.gguf --layers=0:15 --listen=127.0.0.1:7001 {CERTIFIED}",
        f"alone, {READY}",
    ),
    ours(f"worker --model=model.gguf --layers=15:30 --listen=127.0.0.1:7002 {CERTIFIED}", READY),
    Step("meshnet recipe 127.0.0.1:7001"),
    Step("meshnet recipe 127.0.0.1:7001 127.0.0.1:7002"),
    Step("meshnet metrics 127.0.0.1:7001 127.0.0.1:7002"),
    Step("meshnet metrics 127.0.0.1:7001 127.0.0.1:7002 --listen=127.0.0.1:9102", LISTENS),
    Step(
        "meshnet certification check lane.json --worker 127.0.0.1:7001",
        settings="MESHNET_CERTIFICATION_CONTRACT=lane.v1.yaml",
    ),
    # A mesh.
    Step("meshnet serve smollm2", f"alone, {SERVED}"),
    Step("meshnet serve --join 127.0.0.1:7100", 'until "this machine serves"'),
    Step("meshnet status"),
    Step("meshnet status --watch", 'until "answers under way"'),
    Step("meshnet status --url https://llm.example/v1 --json"),
    Step("meshnet status --tracker 127.0.0.1:7100"),
    Step("meshnet doctor"),
    Step("meshnet doctor smollm2 --tracker 127.0.0.1:7100"),
    Step("meshnet doctor --json"),
    Step("meshnet models"),
    Step("meshnet models --tracker 127.0.0.1:7100 --json"),
    Step("meshnet chat", 'says "smollm2 at http", says "waiting for the first token"', typed=TALK),
    Step(
        'meshnet chat smollm2 --url http://127.0.0.1:8080/v1 --system "Be short."',
        'says "smollm2 at http", says "waiting for the first token"',
        typed=TALK,
    ),
    Step('echo "What is gravity?" | meshnet chat'),
    Step("meshnet plan model.gguf --tracker 127.0.0.1:7100 --model-id smollm2"),
    Step("meshnet bench"),
    Step("meshnet bench http://127.0.0.1:8080/v1 https://other.example/v1 --svg speed.svg"),
    ours("grep '<svg' speed.svg"),
    Step("meshnet bench smollm2 --compare-stages 1,2 --json"),
    Step("meshnet bench http://127.0.0.1:8080/v1 ~/models/llama.gguf"),
    # Others.
    Step(
        "meshnet serve ~/models/llama.gguf --stages 3 --listen 127.0.0.1:9000", f"alone, {SERVED}"
    ),
    Step("meshnet serve llama --tracker 127.0.0.1:7100", SERVED),
    ours(
        "worker --model=model.gguf --layers=0:15 --listen=10.0.0.5:7001 --insecure",
        f"alone, {READY}",
    ),
    ours("worker --model=model.gguf --layers=15:30 --listen=10.0.0.6:7001 --insecure", READY),
    Step("meshnet serve llama --workers 10.0.0.5:7001,10.0.0.6:7001 --insecure", SERVED),
    ours(
        "python3 -u -m http.server --bind 127.0.0.1 --directory web 8000", 'alone, until "Serving"'
    ),
    ours("meshnet manifest web/v4 --out v4.json"),
    Step(
        "meshnet serve v4.json --from https://models.example/v4 --mesh-listen 10.0.0.5:7100 "
        "--tls-cert a.pem --tls-key a.key --tls-ca authorities.pem",
        SERVED,
    ),
    # The address and the authorities stand in the settings.
    ours(
        "meshnet serve v4 --tracker 10.0.0.5:7100 --tls-cert a.pem --tls-key a.key",
        'until "http://127.0.0.1:9000"',
        "MESHNET_SETTINGS=settings.yaml",
    ),
    Step(
        "meshnet doctor --tracker 10.0.0.5:7100 --tls-cert a.pem --tls-key a.key "
        "--tls-ca authorities.pem"
    ),
    Step(
        "meshnet tracker --listen 127.0.0.1:7100 --database sqlite:////var/lib/meshnet/tracker.db",
        f"alone, {LISTENS}",
    ),
    Step("meshnet node --sample > node.yaml"),
    ours('sed -i "s#: /#: $HOME/#" node.yaml'),
    Step("meshnet node --config node.yaml --check"),
    Step("meshnet node --config node.yaml", 'until "registered"'),
    Step("meshnet relay --listen 127.0.0.1:7200", LISTENS),
    ours("cp a.pem me.pem && cp a.key me.key && cp authorities.pem fleet.pem"),
    Step(
        "meshnet relay --listen 0.0.0.0:7200 --tls-cert me.pem --tls-key me.key --tls-ca fleet.pem",
        f"alone, {LISTENS}",
    ),
    Step(
        "meshnet tracker --database postgresql://meshnet@db/meshnet "
        "--trusted-key certifier.pem.pub",
        f"alone, {LISTENS}",
    ),
    Step("meshnet certification import lane.records --tracker 127.0.0.1:7100"),
]


def test_every_example_is_a_step() -> None:
    blocks = [block for block in blocks_of(DOCUMENT.read_text()) if block.language == "sh"]
    shown = [line for block in blocks for line in lines_of(block.text)]
    assert len(shown) > 50
    assert Counter(step.line for step in STEPS if not step.ours) == Counter(shown)


def put_files(home: pathlib.Path) -> None:
    """What a reader has who looks up a command: models, and somebody else's files."""
    for place in ("models/llama.gguf", "srv/models/smollm2.gguf"):
        (home / place).parent.mkdir(parents=True)
        (home / place).symlink_to(MODEL)
    for place in ("srv/models/v4", "web/v4"):
        (home / place).mkdir(parents=True)
        (home / place / "model.gguf").symlink_to(MODEL)
    (home / "model.gguf").symlink_to("models/llama.gguf")
    (home / "tiny.gguf").symlink_to(TINY)
    for number, part in enumerate(SPLIT, 1):
        (home / f"model-{number:05}-of-{len(SPLIT):05}.gguf").symlink_to(part)
    write_short_plan(home)
    [settings] = [block for block in blocks_of(DOCUMENT.read_text()) if block.language == "yaml"]
    (home / "settings.yaml").write_text(settings.text.replace("/etc/meshnet", str(home)))
    approver = SigningKey.generate()
    approver.save(home / "approver.pem")
    SigningKey.generate().save(home / "me.pem")
    for name in ("lane", "mixture"):
        write_lane_contract(home, approver, f"{name}.v1.yaml")
    contract = home / "alpha.v1.yaml"
    shutil.copyfile(default_folder() / contract.name, contract)
    terms = PerformanceContract.read(contract)
    lock(terms, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    write_empty_results(home, terms.sha256)


async def test_examples_do_what_they_say(tmp_path: pathlib.Path) -> None:
    await provide_model(tmp_path / "storage", "smollm2", MODEL)
    home = tmp_path / "a"
    with PostgresServer.start() as postgres:
        reader = Reader(
            tmp_path,
            Programs(run={}, build={}, path=installed(MESHNET, WORKER)),
            words={
                **dict.fromkeys(
                    (
                        "https://example.org/models/v4",
                        "https://a.example/v4",
                        "https://models.example/v4",
                    ),
                    "http://127.0.0.1:8000/v4",
                ),
                "https://other.example/v1": "http://127.0.0.1:8080/v1",
                "https://llm.example/v1": "http://127.0.0.1:8080/v1",
                "/srv/models": f"{home}/srv/models",
                "/mnt/models": f"{home}/web/v4",
                "/var/lib/meshnet": str(home),
                "postgresql://meshnet@db/meshnet": f"'{postgres.url('meshnet')}'",
                "deepseek-v4-flash": "deepseek4-tiny-fixture",
                "V4-00001-of-00004.gguf": "model-00001-of-00003.gguf",
                "smollm2 --mixed --head-flag=--device=cpu": (
                    "tiny.gguf --model-id=m --mixed --head-flag=--cpu_variant=sse42"
                ),
            },
            environment={
                "MESHNET_STORAGE": str(tmp_path / "storage"),
                "MESHNET_BENCH_MAX_TOKENS": "8",
                "MESHNET_BENCH_PROMPT_TOKENS": "16",
                "MESHNET_BENCH_REPEATS": "1",
                "MESHNET_CERTIFY_THREADS": "1",
                "MESHNET_CHAT_MAX_TOKENS": "8",
                "MESHNET_EVIDENCE_CONTRACT": "deepseek4-tiny-fixture",
                "MESHNET_EVIDENCE_PLAN": "plan.json",
                "MESHNET_EVIDENCE_THREADS": "1",
            },
        )
        put_files(home)
        try:
            async with asyncio.timeout(END):
                for number, step in enumerate(STEPS):
                    started = time.monotonic()
                    await reader.do(Block(number, "sh", step.text, "run", step.how))
                    print(f"{time.monotonic() - started:.1f} s: {step.line}")
        finally:
            await reader.end()
