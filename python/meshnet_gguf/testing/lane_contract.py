"""A small contract for lanes, locked and approved: for tests of certification."""

from __future__ import annotations

import datetime
import pathlib

from meshnet.signing import SigningKey

from meshnet_gguf import performance_contract
from meshnet_gguf.performance_contract import PerformanceContract, default_folder

__all__ = ["write_lane_contract"]


def write_lane_contract(
    folder: pathlib.Path, approver: SigningKey | None, name: str = "lane.v1.yaml"
) -> PerformanceContract:
    """The project's contract for lanes with less to run and bounds that any machine keeps.

    With another name it is that for mixtures.
    """
    text = (default_folder() / name).read_text("utf-8")
    less = {
        "minimum_samples: 3": "minimum_samples: 1",
        "tokens: 128": "tokens: 24",
        "tokens: 1024": "tokens: 40",
        "context_tokens: 2048": "context_tokens: 256",
        "output_tokens: 64": "output_tokens: 8",
        "at_least: 3\n": "at_least: 0.001\n",
        "at_most: 30000": "at_most: 600000",
    }
    if name == "lane.v1.yaml":
        less["at_least: 0.5"] = "at_least: 0.001"
    for old, new in less.items():
        if old not in text:
            raise AssertionError(f"{name} has no {old!r} any more")
        text = text.replace(old, new)
    file = folder / name
    file.write_text(text, "utf-8")
    contract = PerformanceContract.read(file)
    performance_contract.lock(contract, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    if approver is None:
        return contract
    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    return performance_contract.approve(contract, approver, "A. Tester", now)
