"""Nothing that runs before the CPU variant is chosen uses an instruction beyond x86-64-v2.

The whole program is disassembled. Such instructions are in ggml's CPU variants alone, whose code is
local to their isolated objects, and in what looks at the CPU first by itself.
"""

import collections
import os
import pathlib
import re
import subprocess

WORKER = os.environ["WORKER"]
VARIANTS = {
    pathlib.Path(name).stem.rpartition("_")[2]: name for name in os.environ["VARIANTS"].split()
}
# OpenSSL chooses its routines at start; its code is all of its library, assembler included.
LIBCRYPTO = "/opt/sysroot/usr/lib/x86_64-linux-gnu/libcrypto.a"
# Abseil's random numbers and libstdc++'s std::random_device ask the CPU first.
ASKS_FIRST = {
    "_ZN4absl7debian315random_internal11RandenHwAes8GenerateEPKvPv",
    "_ZNSt12_GLOBAL__N_112__x86_rdrandEPv",
    "_ZNSt12_GLOBAL__N_112__x86_rdseedEPv",
    "_ZNSt12_GLOBAL__N_119__x86_rdseed_rdrandEPv",
}

# VEX and EVEX encodings (AVX and all after it), AVX-512 masks, BMI, and what else came after SSE4.2
# and POPCNT. TZCNT is left out: where it is unknown it runs as BSF, which compilers count on.
NEWER = (
    r"v(\w{4,}|por)|k(mov|andn?|x?n?or|xor|not|o?r?test|shift[lr]|unpck\w\w|add)[bwdq]"
    r"|andn|bextr|bls(r|i|msk)|bzhi|mulx|pdep|pext|rorx|s[ah][rl]x|lzcnt|movbe"
    r"|aes\w+|pclmul\w+|sha(1|256)\w+|ad[co]x|rdrand|rdseed|gf2p8\w+|tile\w+|tdp\w+|[ls]t?tilecfg"
)
FUNCTION = re.compile(r"^([0-9a-f]+) <(.*)>:$")
INSTRUCTION = rf"^ *[0-9a-f]+:\s+(\{{\w+\}} )?({NEWER})\b"

Symbols = dict[int, set[tuple[str, str]]]


def symbols(file: str) -> Symbols:
    """Kinds and names by address; a small letter is the kind of what its object alone sees."""
    found: Symbols = collections.defaultdict(set)
    listed = subprocess.run(["nm", file], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        address, _, rest = line.partition(" ")
        kind, _, name = rest.strip().partition(" ")
        if name and address.strip():
            found[int(address, 16)].add((kind, name))
    return found


def names(file: str) -> set[str]:
    return {name for some in symbols(file).values() for _, name in some}


def newer_than_v2() -> dict[tuple[int, str], set[str]]:
    """The functions with such instructions, by address and name."""
    found: dict[tuple[int, str], set[str]] = {}
    with (
        subprocess.Popen(
            ["objdump", "--disassemble", "--no-show-raw-insn", "--wide", WORKER],
            stdout=subprocess.PIPE,
        ) as objdump,
        subprocess.Popen(
            ["grep", "-E", rf"{FUNCTION.pattern}|{INSTRUCTION}"],
            stdin=objdump.stdout,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        ) as grep,
    ):
        assert grep.stdout is not None
        function = (0, "")
        for line in grep.stdout:
            if header := FUNCTION.match(line):
                function = (int(header[1], 16), header[2])
            else:
                found.setdefault(function, set()).add(line.split()[1])
    assert objdump.returncode == 0
    return found


def test_only_what_is_chosen_at_start_uses_newer_instructions() -> None:
    kinds = symbols(WORKER)
    in_variants = {name for file in VARIANTS.values() for name in names(file)}
    in_libcrypto = names(LIBCRYPTO)
    variants: set[str] = set()
    libraries: set[str] = set()
    others: dict[str, set[str]] = {}
    for (address, name), instructions in newer_than_v2().items():
        # The same template's instance outside the variants is no local symbol.
        local = all(kind.islower() and kind != "w" for kind, _ in kinds[address])
        if local and name in in_variants:
            variants |= instructions
        elif name in in_libcrypto or name in ASKS_FIRST:
            libraries |= instructions
        else:
            others[name] = instructions
    assert others == {}
    # What is looked for is there where it belongs: AVX2, FMA, AVX-512, VNNI, AMX.
    assert {"vpaddd", "vfmadd231ps", "kmovd", "vpdpbusd", "tdpbssd"} <= variants
    assert {"aesenc", "vpaddd", "rdrand"} <= libraries


def test_the_plainest_variant_uses_none() -> None:
    disassembled = subprocess.run(
        ["objdump", "--disassemble", "--no-show-raw-insn", "--wide", VARIANTS["sse42"]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert len(disassembled) > 1_000_000
    assert re.findall(INSTRUCTION, disassembled, re.MULTILINE) == []
