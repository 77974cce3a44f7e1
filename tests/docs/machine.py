"""A machine of its own for a test: its first process is systemd, and it may be installed on.

    async with Machine.boot(folder, "10.0.0.5", "10.0.0.6") as machine:
        await asyncio.create_subprocess_exec(*machine.inside, "systemctl", "start", "some.service")

It is this machine's system seen through namespaces: processes, network (with these addresses and no
other), control groups, and, over /etc, /opt, /usr/local and the folders of /var, copies in memory
that end with it. Nothing of them is seen outside, and none of this machine's services runs in it.

Only root may boot one: systemd gives services users and control groups of their own, which takes
more than a user namespace. OSError when that is not allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
from collections.abc import AsyncIterator

__all__ = ["Machine"]

_BOOT_SECONDS = 60.0
# A group below all others' and not beside them: systemd is the root of what it sees.
_OUTSIDE = """
    mkdir "$folder"
    mount -t tmpfs machine "$folder"
    mkdir "$folder/groups"
    mount -t cgroup2 groups "$folder/groups"
    mkdir "$folder/groups/$group"
    echo $$ >"$folder/groups/$group/cgroup.procs"
    umount "$folder/groups"
    exec unshare --pid --fork --cgroup --net --uts --ipc --kill-child bash -euc "$inside"
"""
_INSIDE = """
    for place in etc opt usr/local var/cache var/lib var/log; do
        mkdir -p "$folder/upper/$place" "$folder/spare/$place"
        mount -t overlay "$place" "/$place" \
            -o "lowerdir=/$place,upperdir=$folder/upper/$place,workdir=$folder/spare/$place"
    done
    mount -t tmpfs run /run
    mount -t proc proc /proc
    mount -t sysfs sys /sys
    mount -t cgroup2 groups /sys/fs/cgroup
    rm -rf /etc/systemd/system /etc/machine-id
    mkdir /etc/systemd/system
    tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id
    printf '[Unit]\\nWants=systemd-journald.service\\n' >/etc/systemd/system/machine.target
    /usr/bin/python3 "$network" $addresses
    hostname machine
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    exec env -i "PATH=$PATH" container=meshnet /usr/lib/systemd/systemd --system \
        --unit=machine.target --show-status=0 --log-target=journal
"""
_CLEAN = """
    mount -t cgroup2 groups "$folder"
    find "$folder/$group" -depth -type d -exec rmdir {} +
"""


class Machine:
    """A machine that has booted. Made by boot(); `inside` goes before a command that runs on it."""

    def __init__(self, first: int) -> None:
        self.inside = ["nsenter", f"--target={first}", *_NAMESPACES]

    @classmethod
    @contextlib.asynccontextmanager
    async def boot(cls, folder: pathlib.Path, *addresses: str) -> AsyncIterator[Machine]:
        """A new machine, as long as the block runs; `folder` is for what is in its way."""
        if os.geteuid() != 0:
            raise OSError(f"expected root, who may boot a machine, got user {os.geteuid()}")
        variables = {
            **os.environ,
            "folder": str(folder),
            "group": f"meshnet-machine-{os.getpid()}",
            "inside": _INSIDE,
            "network": str(pathlib.Path(__file__).with_name("network.py").resolve()),
            "addresses": " ".join(addresses),
        }
        apart = ("unshare", "--mount", "--propagation=private", "bash", "-euc")
        log = folder.with_suffix(".log")
        with log.open("wb") as output:
            outer = await asyncio.create_subprocess_exec(
                *apart, _OUTSIDE, env=variables, stdout=output, stderr=output
            )
        first = 0
        try:
            async with asyncio.timeout(_BOOT_SECONDS):
                while not first or not await cls._answers(first):
                    assert outer.returncode is None, log.read_text()
                    first = _child(outer.pid)
                    await asyncio.sleep(0.05)
            yield cls(first)
        finally:
            with contextlib.suppress(ProcessLookupError):
                # The first process ends everything else of its namespace with it.
                os.kill(first, signal.SIGKILL) if first else outer.kill()
            await outer.wait()
            cleaner = await asyncio.create_subprocess_exec(*apart, _CLEAN, env=variables)
            await cleaner.wait()

    @classmethod
    async def _answers(cls, first: int) -> bool:
        """Whether systemd has started what it starts."""
        asked = await asyncio.create_subprocess_exec(
            *cls(first).inside,
            *("systemctl", "is-system-running", "--quiet"),
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await asked.wait() == 0


def _child(process: int) -> int:
    """The process that one has started; 0 as long as there is none."""
    try:
        found = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0
    return int(found[0]) if found else 0


_NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup")
