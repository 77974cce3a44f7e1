"""Runs the operator's guide, block after block, on a machine of its own with systemd.

The units run as they stand there, under everything that they forbid themselves; what is behind an
edited node.yaml is a small random model. The next release is this one under another version and
with another patch stack (release/next_release.py).
"""

import asyncio
import os
import pathlib
import sys
import time

import yaml
from meshnet.testing.postgres import PostgresServer

from release.next_release import next_release
from tests.docs.blocks import Block, blocks_of
from tests.docs.machine import Machine
from tests.docs.reader import Programs, Reader

BLOCKS = list(blocks_of(pathlib.Path(os.environ["DOCUMENT"]).read_text()))
SMALL_MODEL = pathlib.Path(os.environ["SMALL_MODEL"]).absolute()
MESHNET = pathlib.Path(os.environ["MESHNET"]).absolute()
# For this machine's CPU; another's may lie beside it.
FILES = [path for path in os.environ["RELEASE"].split() if "aarch64" not in path]
RELEASE = [pathlib.Path(path).absolute() for path in FILES]
VERSION, NEXT = os.environ["VERSION"], "0.2.0"
SERVICES = ["meshnet-tracker", "meshnet-node", "meshnet-gateway"]
END = 800.0

# Two workers of which nobody is told how they differ: a client looks, as a gateway does.
COMBINE = """
import asyncio, sys
from meshnet_gguf.client import open_route
asyncio.run(open_route(sys.argv[1:]))
"""


class Operator(Reader):
    """A reader on the machine, who edits files as the guide asks and looks whether it is true."""

    key = ""

    async def on_it(self, text: str, *, fails: bool = False) -> str:
        """What a command of the test's own says on the machine."""
        return await self._do(Block(0, "sh", text, "run", "fails" if fails else ""), "a")

    async def shown(self, service: str, name: str) -> str:
        """A property of a service."""
        said = await self.on_it(f"systemctl show --value --property={name} {service}")
        return said.strip()

    async def worker(self) -> str:
        """Which programs the node's service runs, its worker among them."""
        group = await self.shown("meshnet-node", "ControlGroup")
        return await self.on_it(
            f"for each in $(cat /sys/fs/cgroup/{group}/cgroup.procs);"
            " do readlink /proc/$each/exe; done"
        )

    async def answered(self) -> None:
        """A client has an answer of the gateway."""
        said = await self.on_it(
            "curl -s --fail-with-body http://127.0.0.1:8080/v1/completions"
            f" -H 'Content-Type: application/json' -H 'Authorization: Bearer {self.key}'"
            """ -d '{"model": "llama", "prompt": "Hello", "max_tokens": 4}'"""
        )
        assert "text_completion" in said

    async def killed_and_stopped(self, services: list[str], ready: str) -> None:
        """Services come back after kill -9, and end as they should."""
        for service in services:
            await self.on_it(f"systemctl kill --kill-whom=main --signal=KILL {service}")
        for service in services:
            await self.on_it(
                f"until [ $(systemctl show --value -p NRestarts {service}) = 1 ]"
                f" && systemctl is-active --quiet {service}; do sleep 0.1; done"
            )
        await self.on_it(f"until {ready}; do sleep 0.1; done")
        for service in reversed(services):
            await self.on_it(f"systemctl stop {service}")
            assert await self.shown(service, "Result") == "success"
            assert await self.shown(service, "ExecMainStatus") == "0"


def edited(file: pathlib.Path) -> None:
    """What an operator makes of the sample."""
    config = yaml.safe_load(file.read_text())
    config["node"] |= {
        "id": "node-b",
        "folder": "/var/lib/meshnet/node-b",
        "listen": "10.0.0.6:0",
        "metrics_listen": "10.0.0.6:9300",
    }
    config["tracker"]["endpoints"] = ["10.0.0.5:7100"]
    config["model"] = {"id": "llama", "file": "/var/lib/meshnet/model.gguf"}
    config["worker"] |= {"listen": "10.0.0.6:0", "route_token_keys": "/etc/meshnet/token.pem.pub"}
    config["tls"] = {
        "certificate": "/etc/meshnet/node-b.pem",
        "key": "/etc/meshnet/node-b.key",
        "authority": "/etc/meshnet/authorities.pem",
    }
    file.write_text(yaml.safe_dump(config))


async def installed(operator: Operator) -> None:
    await operator.on_it(
        f'mkdir -p /var/lib/meshnet && cp "{SMALL_MODEL}" /var/lib/meshnet/model.gguf'
    )


async def run_by_systemd(operator: Operator) -> None:
    await operator.answered()
    assert f"/versions/{VERSION}-" in await operator.worker()
    ready = "curl -sf http://127.0.0.1:8080/readyz"
    await operator.killed_and_stopped(SERVICES, ready)
    # A worker without a node: the unit that the release brings.
    flags = "--model=/var/lib/meshnet/model.gguf\\n--layers=0:4\\n--listen=127.0.0.1:7001\\n"
    await operator.on_it(f"printf -- '{flags}' >/etc/meshnet/worker.flags")
    await operator.on_it("systemctl start meshnet-worker")
    await operator.killed_and_stopped(
        ["meshnet-worker"], "/opt/meshnet/bin/meshnet recipe 127.0.0.1:7001"
    )
    await operator.on_it(f"systemctl start {' '.join(SERVICES)}")
    await operator.on_it(f"until {ready}; do sleep 0.1; done")


async def upgraded(operator: Operator) -> None:
    await operator.answered()
    assert f"/versions/{NEXT}-" in await operator.worker()
    store = "/opt/meshnet-worker"
    for name, layers, port in (("previous", "0:4", 7301), ("current", "4:8", 7302)):
        await operator.on_it(
            f"systemd-run --quiet --unit=half-{port} {store}/{name}/bin/meshnet-worker"
            f" --model=/var/lib/meshnet/model.gguf --layers={layers} --listen=127.0.0.1:{port}"
        )
    meshnet, halves = "/opt/meshnet/bin/meshnet", "127.0.0.1:7301 127.0.0.1:7302"
    for half in halves.split():
        await operator.on_it(f"until {meshnet} recipe {half}; do sleep 0.1; done")
    differ = await operator.on_it(f"{meshnet} recipe {halves} --json", fails=True)
    assert "llama_cpp_patches_sha256" in differ
    refused = await operator.on_it(f"/opt/meshnet/bin/python3 -c '{COMBINE}' {halves}", fails=True)
    assert "RECIPE_MISMATCH" in refused
    await operator.on_it("systemctl stop half-7301 half-7302")


async def rolled_back(operator: Operator) -> None:
    await operator.answered()
    assert f"/versions/{VERSION}-" in await operator.worker()


async def removed(operator: Operator) -> None:
    left = await operator.on_it(
        "find /opt/meshnet* /usr/local /etc/systemd/system -name 'meshnet*' 2>/dev/null || true"
    )
    assert left == ""
    kept = await operator.on_it("ls /etc/meshnet /var/lib/meshnet* /var/lib/meshnet-tracker/")
    assert {"node.yaml", "worker.flags", "model.gguf", "tracker.db"} <= set(kept.split())


# What is looked at after the block that says this.
LOOK = {
    "install.sh --system\nsudo install -d": installed,
    "enable --now meshnet-tracker": run_by_systemd,
    "restart meshnet-gateway\nuntil": upgraded,
    "install.sh --system --rollback": rolled_back,
    "install.sh --system --uninstall": removed,
}


async def test_all_that_the_guide_says(tmp_path: pathlib.Path) -> None:
    looked = []
    with PostgresServer.start(superuser="postgres") as database:
        async with Machine.boot(tmp_path / "machine", "10.0.0.5", "10.0.0.6") as machine:
            operator = Operator(
                tmp_path,
                Programs(
                    run={},
                    build={},
                    path={
                        "meshnet": f'exec "{MESHNET}" "$@"',
                        "createuser": f'exec "{database.programs}/createuser" "$@"',
                        "createdb": f'exec "{database.programs}/createdb" "$@"',
                    },
                ),
                words={"meshnet@db.example/meshnet": f"meshnet@/meshnet?host={database.socket}"},
                environment={
                    "PGHOST": str(database.socket),
                    "SITE_PACKAGES": os.pathsep.join(p for p in sys.path if p.endswith("/site")),
                    "SITE_PACKAGES_COPIED": "1",
                },
                inside=machine.inside,
            )
            here = operator.machine("a")
            for file in RELEASE:
                (here / file.name).symlink_to(file)
            next_release(RELEASE, VERSION, NEXT, here)
            try:
                async with asyncio.timeout(END):
                    for block in BLOCKS:
                        started = time.monotonic()
                        if block.treatment == "unit":
                            unit = f"/etc/systemd/system/{block.detail}"
                            await operator.on_it(f"cat >{unit} <<'UNIT'\n{block.text}UNIT")
                        elif block.treatment == "run":
                            await operator.do(block)
                        if "api-keys add" in block.text:
                            operator.key = operator.said.split()[0]
                        if "node --sample" in block.text:
                            edited(here / "node.yaml")
                        for words, look in LOOK.items():
                            if words in block.text:
                                await look(operator)
                                looked.append(look)
                        print(f"line {block.line}: {time.monotonic() - started:.1f} s")
            finally:
                await operator.end()
    assert looked == list(LOOK.values())
