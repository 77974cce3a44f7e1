"""Lanes: what a worker computes with besides the CPU.

    load("//platforms:lanes.bzl", "LANE_SDK")

    cc_binary(..., target_compatible_with = LANE_SDK)

Each lane has a repository @LANE_sdk, which is fetched when the lane is asked for. Its target `sdk` is a constraint: the
lane's own where the SDK is there, and otherwise one that no platform has and whose name is the reason. So has aarch64
Linux, whose SDK is a cross compiler and libraries.
"""

LANES = [
    "cuda",
    "metal",
    "rocm",
    "vulkan",
]

# For the target_compatible_with of what needs the SDK of its lane or CPU: says what is missing before anything else is looked at.
LANE_SDK = select(
    {Label("//platforms:is_" + lane): [Label("@%s_sdk//:sdk" % lane)] for lane in LANES} |
    {
        Label("//platforms:is_linux_aarch64"): [Label("@aarch64_sdk//:sdk")],
        "//conditions:default": [],
    },
)
