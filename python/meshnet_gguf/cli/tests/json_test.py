"""Every command and action with --json: it does its work, and stdout is one JSON object."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import AsyncIterator
from typing import Any

import yaml
from meshnet.certification import Lane, issue
from meshnet.signing import SigningKey
from meshnet_gguf.cli.commands import COMMANDS, describe
from meshnet_gguf.cli.completion import bash_completion, zsh_completion
from meshnet_gguf.performance_contract import Outcome, default_folder
from meshnet_gguf.testing.cluster import FakeCluster, cluster_of, fake_specs
from meshnet_gguf.testing.commands import Commands
from meshnet_gguf.testing.empty_results import write_empty_results
from meshnet_gguf.testing.lane_contract import record_that_certifies, write_lane_contract
from meshnet_gguf.testing.node_process import node_values
from meshnet_gguf.testing.serve_process import serving
from meshnet_gguf.testing.short_plan import write_short_plan

MESHNET = os.environ["MESHNET"]
TINY = pathlib.Path(os.environ["FIXTURE_TINY"]).absolute()
END = 240.0
MACHINES = """
machines:
  - {name: large, memory: 1GB, weights_per_second: 2GB, latency_us: 100}
"""
OUTCOME = [field.name for field in dataclasses.fields(Outcome)]


@dataclasses.dataclass
class Asking:
    """Runs command lines, and remembers which of all there are it has seen answer."""

    commands: Commands
    folder: pathlib.Path
    seen: set[str] = dataclasses.field(default_factory=set)

    async def answer(
        self, what: str, *arguments: str | pathlib.Path, code: int = 0, shows: str = "", **more: Any
    ) -> Any:
        """What `meshnet WHAT ARGUMENTS --json` says on stdout, and nothing else.

        On stderr stands what it `shows` of how far it is.
        """
        done = await self.commands.run(
            *what.split(), *arguments, "--json", impatient=bool(shows), **more
        )
        assert done.code == code, (what, done)
        self.seen.add(what)
        lines = done.out.splitlines()
        assert len(lines) == 1, (what, done)
        assert shows in done.err, (what, done)
        return json.loads(lines[0])

    @contextlib.asynccontextmanager
    async def serving(self, what: str, *arguments: str | pathlib.Path) -> AsyncIterator[Any]:
        """What one says that serves until it is told to end, which it does with the block."""
        async with serving(MESHNET, what, *arguments) as (said, _):
            yield said
        self.seen.add(what)


async def test_every_command_answers_in_json(tmp_path: pathlib.Path) -> None:
    async with (
        asyncio.timeout(END),
        Commands() as commands,
        cluster_of(fake_specs()) as fake,
        asyncio.TaskGroup() as group,
    ):
        asking = Asking(commands, tmp_path)
        for check in (
            keys,
            certs,
            api_keys,
            contracts,
            completions,
            artifacts,
            plans,
            measured,
            certified,
        ):
            group.create_task(check(asking))
        for about in (workers, mesh, gateway):
            group.create_task(about(asking, fake))
    wanted = {
        f"{name} {action}" if action else name
        for name in COMMANDS
        for action in describe(name).actions or ("",)
    }
    assert asking.seen == wanted


async def keys(asking: Asking) -> None:
    file = asking.folder / "key.pem"
    made = await asking.answer("keys make", file)
    assert made == {"key_ids": [SigningKey.load(file).key_id]}
    assert await asking.answer("keys show", f"{file}.pub") == made


async def certs(asking: Asking) -> None:
    folder = asking.folder / "ca"
    written = [str(folder / "authorities.pem")]
    made = await asking.answer("certs init", folder)
    assert made["written"] == written
    (authority,) = made["certificates"]
    assert authority["is_authority"] is True
    assert set(authority) == {
        *("common_name", "issuer", "names", "is_authority", "serial", "expires")
    }
    issued = await asking.answer("certs issue", folder, "a", "--host=10.0.0.5")
    assert issued["written"] == [str(folder / "a.pem"), str(folder / "a.key")]
    assert issued["certificates"][0]["names"] == ["a", "10.0.0.5"]
    shown = await asking.answer("certs show", folder / "a.pem")
    assert shown == {**issued, "written": []}
    rotated = await asking.answer("certs rotate", folder)
    assert (rotated["written"], len(rotated["certificates"])) == (written, 2)
    retired = await asking.answer("certs retire", folder)
    assert (retired["written"], len(retired["certificates"])) == (written, 1)


async def api_keys(asking: Asking) -> None:
    file = asking.folder / "keys.json"
    made = await asking.answer("api-keys add", file, "alice", "--max-active=2")
    assert set(made) == {"name", "key"}
    assert (made["name"], made["key"][:11]) == ("alice", "sk-meshnet-")
    listed = await asking.answer("api-keys list", file)
    assert listed == {"keys": [{"name": "alice", "max_active": 2, "requests_per_minute": 0}]}
    assert await asking.answer("api-keys remove", file, "alice") == {"removed": "alice"}
    assert await asking.answer("api-keys list", file) == {"keys": []}


async def contracts(asking: Asking) -> None:
    folder = asking.folder / "contracts"
    folder.mkdir()
    file, key = folder / "alpha.v1.yaml", asking.folder / "approver.pem"
    shutil.copyfile(default_folder() / file.name, file)
    SigningKey.generate().save(key)
    locked = await asking.answer("contract lock", file)
    assert set(locked) == {"contract", "sha256"}
    assert locked["contract"] == "alpha.v1"
    approved = await asking.answer("contract approve", file, "--key", key, "--by=A. Person")
    assert approved == locked
    trusted = f"--trusted-key={key}.pub"
    (checked,) = (await asking.answer("contract check", file, trusted))["contracts"]
    assert checked.pop("locked_at")
    assert checked == {**locked, "approved_by": "A. Person", "approval_is_trusted": True}
    results = write_empty_results(folder, locked["sha256"])
    # 3: it has decided, against the results.
    decided = await asking.answer("contract evaluate", file, results, trusted, code=3)
    assert set(decided) == {"contract", *OUTCOME}
    assert (decided["contract"], decided["passed"]) == ("alpha.v1", False)
    assert decided["decision"] == "optimize measured bottleneck"


async def completions(asking: Asking) -> None:
    assert await asking.answer("completion bash") == {"file": bash_completion()}
    assert await asking.answer("completion zsh") == {"file": zsh_completion()}


async def artifacts(asking: Asking) -> None:
    model = asking.folder / TINY.name
    shutil.copy(TINY, model)
    inspected = await asking.answer("inspect", model, "--cuts=3")
    assert (inspected["architecture"], inspected["main_layers"]) == ("deepseek4", 8)
    assert [stage["layers"] for stage in inspected["stages"]] == [[0, 3], [3, 8]]
    file = asking.folder / "manifest.json"
    made = await asking.answer("manifest", model, "--out", file, shows=f"reading {TINY.name} (")
    assert made == {"artifact_sha256": made["artifact_sha256"], "manifest": str(file)}
    to = asking.folder / "models"
    whole = await asking.answer(
        "provision", file, f"--from={asking.folder}", "--to", to, shows="fetching "
    )
    assert whole == {
        "artifact_sha256": made["artifact_sha256"],
        "folder": str(to / made["artifact_sha256"]),
        "model": str(to / made["artifact_sha256"] / TINY.name),
        "manifest": str(to / made["artifact_sha256"] / "manifest.json"),
        "layers": None,
        "fetched_bytes": TINY.stat().st_size,
        "kept_bytes": 0,
        "rehashed": [TINY.name],
    }
    again = await asking.answer("provision", file, f"--from={asking.folder}", "--to", to)
    kept = {"fetched_bytes": 0, "kept_bytes": TINY.stat().st_size, "rehashed": []}
    assert again == {**whole, **kept}


async def plans(asking: Asking) -> None:
    file = asking.folder / "machines.yaml"
    file.write_text(MACHINES)
    plan = await asking.answer("plan", TINY, f"--machines={file}")
    (stage,) = plan["stages"]
    assert (stage["machine"], stage["layers"], stage["seam_us"]) == ("large", [0, 8], 0)
    assert (plan["proven"], plan["total_us"]) == (True, stage["compute_us"])
    sample = await asking.answer("plan", "--sample")
    assert [machine["name"] for machine in yaml.safe_load(sample["file"])["machines"]]


async def measured(asking: Asking) -> None:
    plan, target = write_short_plan(asking.folder), asking.folder / "evidence.json"
    record = await asking.answer(
        "evidence",
        TINY,
        "--contract=deepseek4-tiny-fixture",
        f"--plan={plan}",
        "--threads=1",
        f"--record={target}",
        shows="starting 2 workers\n",
    )
    assert record == json.loads(target.read_text())
    assert (record["schema"], record["outcome"]) == ("meshnet.evidence/1", "identical")


async def certified(asking: Asking) -> None:
    """Judged from a record alone; certify_test.py makes one, certify_real_model_test certifies."""
    folder = asking.folder / "lane"
    folder.mkdir()
    approver, certifier = SigningKey.generate(), SigningKey.generate()
    for name, key in (("approver", approver), ("certifier", certifier)):
        key.save(folder / f"{name}.pem")
    contract = write_lane_contract(folder, approver)
    record = record_that_certifies(contract)
    (folder / "evidence.json").write_text(json.dumps(record))
    answer = await asking.answer(
        "certify",
        f"--evidence={folder}/evidence.json",
        f"--contract={contract.file}",
        f"--trusted-key={folder}/approver.pem.pub",
        f"--key={folder}/certifier.pem",
        f"--records={folder}/lane.records",
    )
    assert answer == {
        "certified": True,
        "certifies": True,
        "reasons": [],
        "record_id": answer["record_id"],
        "model_id": "smollm2",
        "fingerprint": "f" * 64,
        "backend": "cuda",
    }
    shown = await asking.answer(
        "certification show",
        folder / "lane.records",
        f"--trusted-key={folder}/certifier.pem.pub",
    )
    (row,) = shown["records"]
    assert (row["record_id"], row["status"], row["trusted"]) == (
        *(answer["record_id"], "certified", True),
    )


async def workers(asking: Asking, fake: FakeCluster) -> None:
    head, tail = fake.cluster.endpoints
    one = await asking.answer("recipe", head)
    assert set(one) == {"fingerprint", "evidence", "layers", "fields"}
    assert (one["evidence"], one["layers"]) == ("FIXTURE", [0, 4])
    two = await asking.answer("recipe", head, tail)
    assert two == {"fingerprints": [one["fingerprint"]] * 2, "differences": []}
    shown = await asking.answer("metrics", head, tail)
    assert set(shown) == {head, tail}
    assert (shown[head]["open_sessions"], shown[head]["refusals"]) == (0, {})
    assert set(shown[head]["decode_stay"]) == {"bounds_us", "counts", "sum_us"}
    async with asking.serving("metrics", head, "--listen=127.0.0.1:0") as said:
        assert said == {
            "address": f"127.0.0.1:{said['metrics_port']}",
            "metrics_port": said["metrics_port"],
        }
    folder = asking.folder / "checked"
    folder.mkdir()
    contract = write_lane_contract(folder, None)
    record = record_that_certifies(contract)
    record["recipe"] = {entry["name"]: entry["value"] for entry in one["fields"]}
    (folder / "evidence.json").write_text(json.dumps(record))
    checked = await asking.answer(
        "certification check",
        folder / "evidence.json",
        f"--worker={head}",
        f"--contract={contract.file}",
    )
    assert checked == {"checked": [{"evidence": str(folder / "evidence.json"), "changes": []}]}


async def mesh(asking: Asking, fake: FakeCluster) -> None:
    folder = asking.folder / "mesh"
    folder.mkdir()
    key = SigningKey.generate()
    key.save(folder / "key.pem")
    flags = (f"--database=sqlite:///{folder}/t.db", f"--trusted-key={folder}/key.pem.pub")
    at = "--listen=127.0.0.1:0"
    async with contextlib.AsyncExitStack() as stack:
        tracker = await stack.enter_async_context(
            asking.serving("tracker", at, *flags, "--admit-dark")
        )
        assert set(tracker) == {"address", "metrics_port"}
        relay = await stack.enter_async_context(
            asking.serving("relay", at, "--metrics-listen=127.0.0.1:0")
        )
        assert relay["address"].startswith("127.0.0.1:")
        assert relay["metrics_port"] > 0
        config = folder / "node.yaml"
        config.write_text(yaml.safe_dump(node_values("n", tracker["address"], (0, 8))))
        checked = await asking.answer("node", f"--config={config}", "--check")
        assert checked == {"node": "n", "valid": True}
        sample = await asking.answer("node", "--sample")
        assert yaml.safe_load(sample["file"])["node"]
        node = await stack.enter_async_context(asking.serving("node", f"--config={config}"))
        assert node == {
            "node": "n",
            "worker": node["worker"],
            "layers": [0, 8],
            "fingerprint": node["fingerprint"],
        }
        where = f"--tracker={tracker['address']}"
        status = await asking.answer("status", where)
        (model,) = status["models"]
        assert (model["name"], model["problem"]) == ("m", None)
        models = await asking.answer("models", where)
        assert set(models) == {"known", "installed", "served", "served_by"}
        assert (models["served"], models["served_by"]) == (["m"], tracker["address"])
        doctor = await asking.answer("doctor", where, "--ports=127.0.0.1:0")
        assert (set(doctor), doctor["ok"]) == ({"ok", "checks"}, True)
        assert all(set(each) == {"name", "level", "message", "cure"} for each in doctor["checks"])
        record = issue(key, Lane("m", "f"), issued_ms=1, evidence_sha256="0" * 64)
        (folder / "lane.records").write_bytes(record.encode() + b"\n")
        given = await asking.answer("certification import", folder / "lane.records", where)
        assert given == {"record_ids": [record.record_id]}
        tracked = await stack.enter_async_context(asking.serving("serve", "m", where, at))
        assert tracked["model"] == "m"


async def gateway(asking: Asking, fake: FakeCluster) -> None:
    named = f"--workers={','.join(fake.cluster.endpoints)}"
    async with asking.serving("serve", "fake", named, "--listen=127.0.0.1:0") as said:
        assert said == {
            "model": "fake",
            "url": said["url"],
            "workers": fake.cluster.endpoints,
            "tracker": "",
            "missing": None,
            "problem": None,
            "seconds": said["seconds"],
        }
        where = f"--url={said['url']}"
        status = await asking.answer("status", where)
        assert status["gateway"]["slots"] == 8
        models = await asking.answer("models", where)
        assert (models["served"], models["served_by"]) == (["fake"], said["url"])
        chat = await asking.answer("chat", where, "--max-tokens=5", stdin="Hello")
        assert chat == {"model": "fake", "text": chat["text"]}
        speed = await asking.answer(
            "bench",
            said["url"],
            "--prompt-tokens=8",
            "--max-tokens=4",
            "--repeats=1",
            shows=f"measuring fake at {said['url']} (2 times) ...\n",
        )
        assert set(speed) == {"machine", "results"}
        (result,) = speed["results"]
        assert (result["target"], result["tokens"]) == (f"fake at {said['url']}", 4)
