r"""NOTICE and software bill of materials of what we hand out, from third_party/deps.yaml.

    notice --deps third_party/deps.yaml --product worker --lane cpu --version 0.1.0 \
        --notice OUT --sbom OUT

The bill is CycloneDX 1.6 as JSON. It holds no time and no random number: the same list gives the
same bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

__all__ = ["components_of", "main", "notice", "sbom"]

# What each product contains, or is installed with.
PRODUCTS: Mapping[str, tuple[str, frozenset[str]]] = {
    "worker": ("meshnet-worker", frozenset({"debian", "llama_cpp"})),
    "wheel": ("meshnet_gguf", frozenset({"pypi"})),
}
_OWN_LICENCE = "Apache-2.0"


def components_of(
    dependencies: Sequence[Mapping[str, Any]], product: str, lane: str = "cpu"
) -> list[dict[str, Any]]:
    """The entries of deps.yaml that are part of `product` as it is built for a lane, by name.

    Raises ValueError for an entry that says not what it is for, or under which licence.
    """
    for entry in dependencies:
        missing = [f for f in ("name", "version", "licence", "use", "source") if not entry.get(f)]
        if missing:
            raise ValueError(f"deps.yaml: {entry.get('name', entry)} has no {', '.join(missing)}")
    _, sources = PRODUCTS[product]
    chosen = [
        dict(entry)
        for entry in dependencies
        if (entry["use"] == "program" and entry["source"] in sources)
        or (product == "worker" and lane in entry.get("lanes", ()))
    ]
    return sorted(chosen, key=lambda entry: str(entry["name"]).lower())


def notice(components: Sequence[Mapping[str, Any]], product: str, version: str) -> str:
    """Who wrote what is in the product, and under which licence."""
    name, _ = PRODUCTS[product]
    lines = [
        f"{name} {version}",
        f"is distributed under the {_OWN_LICENCE} licence; see LICENSE.",
        "",
        "It contains:" if product == "worker" else "It is installed with:",
        "",
    ]
    for entry in components:
        lines += [
            f"{entry['name']} {entry['version']}",
            f"    {entry['purpose']}",
            f"    licence: {entry['licence']}",
            f"    {entry['url']}",
            "",
        ]
    if product == "worker":
        lines += ["The licences' texts are in the folder licenses.", ""]
    return "\n".join(lines)


def _licence(expression: str) -> dict[str, Any]:
    if re.fullmatch(r"[A-Za-z0-9.+-]+", expression) and not expression.startswith("LicenseRef-"):
        return {"license": {"id": expression}}
    if re.search(r" (?:AND|OR|WITH) ", expression):
        return {"expression": expression}
    return {"license": {"name": expression}}


def _purl(entry: Mapping[str, Any]) -> str:
    version = str(entry["version"])
    if entry["source"] == "pypi":
        return f"pkg:pypi/{str(entry['name']).lower()}@{version}"
    if entry["source"] == "debian":
        return f"pkg:deb/debian/{entry['packages'][0]}?distro=bookworm"
    if entry["source"] == "sdk":
        package = str(entry["packages"][0])
        if package.startswith("nvidia-"):
            return f"pkg:pypi/{package}@{version}"
        return f"pkg:deb/debian/{package}@{version}?distro=forky"
    path = str(entry["url"]).removeprefix("https://github.com/")
    return f"pkg:github/{path}@{version}"


def sbom(components: Sequence[Mapping[str, Any]], product: str, version: str) -> str:
    """CycloneDX JSON."""
    name, _ = PRODUCTS[product]
    root = f"{name}@{version}"
    listed = [
        {
            "type": "library",
            "bom-ref": _purl(entry),
            "name": entry["name"],
            "version": str(entry["version"]),
            "description": entry["purpose"],
            "licenses": [_licence(str(entry["licence"]))],
            "purl": _purl(entry),
            "externalReferences": [{"type": "website", "url": entry["url"]}],
        }
        for entry in components
    ]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": name,
                "version": version,
                "licenses": [_licence(_OWN_LICENCE)],
            }
        },
        "components": listed,
        "dependencies": [{"ref": root, "dependsOn": [entry["bom-ref"] for entry in listed]}],
    }
    return json.dumps(document, indent=2) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Writes both files."""
    parser = argparse.ArgumentParser(prog="notice", description=__doc__)
    parser.add_argument("--deps", type=pathlib.Path, required=True)
    parser.add_argument("--product", choices=sorted(PRODUCTS), required=True)
    parser.add_argument("--lane", default="cpu")
    parser.add_argument("--version", required=True)
    parser.add_argument("--notice", type=pathlib.Path, required=True)
    parser.add_argument("--sbom", type=pathlib.Path, required=True)
    options = parser.parse_args(arguments)
    dependencies = yaml.safe_load(options.deps.read_text("utf-8"))
    components = components_of(dependencies, options.product, options.lane)
    options.notice.write_text(notice(components, options.product, options.version), "utf-8")
    options.sbom.write_text(sbom(components, options.product, options.version), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
