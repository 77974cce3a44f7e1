"""A network of its own for a test: addresses of several machines, and ports that nobody else has.

    enter_network("10.0.0.5", "10.0.0.6")

Linux alone, without any privilege: a user and a network namespace, which everything that the
process starts is in, too. It has these addresses and 127.0.0.1, and reaches nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import socket
import struct
import sys

__all__ = ["add_addresses", "enter_network"]

# <linux/sched.h>, <linux/sockios.h>, <linux/if.h>; os.unshare() came with Python 3.12.
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_IFF_UP = 0x1


def enter_network(*addresses: str) -> None:
    """For the rest of the process, which must have one thread. OSError when that is not allowed."""
    user, group = os.geteuid(), os.getegid()
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"expected to enter a network of its own: {os.strerror(number)}")
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        pathlib.Path("/proc/self", file).write_text(text)
    add_addresses(*addresses)


def add_addresses(*addresses: str) -> None:
    """Gives the network that this process is in its loopback device, with these addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
        for number, address in enumerate(addresses):
            name = f"lo:{number}".encode()
            place = struct.pack("16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, _SIOCSIFADDR, place)


if __name__ == "__main__":
    add_addresses(*sys.argv[1:])
