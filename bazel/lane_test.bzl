"""Tests that compute on the lane's accelerator.

    load("//bazel:lane_test.bzl", "LANE_DRIVER", "LANE_ENV", "ON_ACCELERATOR")

    meshnet_cc_test(..., data = LANE_DRIVER, env = LANE_ENV, target_compatible_with = ON_ACCELERATOR)

    tools/bazel test --config=vulkan //cc/shard_engine/llama:accelerator_contract_test
    tools/bazel test --config=vulkan --define=meshnet_driver=system ...       # on the machine's own driver and hardware

On the cpu lane there are no such tests. On the vulkan lane they run on Mesa's lavapipe, which computes on the CPU, unless
the machine's own driver is asked for.
"""

_SDK = "../%s/usr/" % Label("@vulkan_sdk//:sdk").repo_name

ON_ACCELERATOR = select({
    Label("//platforms:is_cpu"): ["@platforms//:incompatible"],
    "//conditions:default": [],
})

# Of the vulkan lane alone.
ON_VULKAN = ["//platforms:vulkan_accelerator"]

LANE_DRIVER = select({
    Label("//platforms:is_vulkan"): [
        Label("@vulkan_sdk//:lavapipe"),
        Label("@vulkan_sdk//:lavapipe_driver"),
    ],
    Label("//platforms:is_vulkan_on_system_driver"): [],
    "//conditions:default": [],
})

LANE_ENV = select({
    Label("//platforms:is_vulkan"): {
        # ggml leaves out devices that are CPUs unless they are named.
        "GGML_VK_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": _SDK + "lib/x86_64-linux-gnu",
        "MESA_SHADER_CACHE_DISABLE": "true",
        "VK_DRIVER_FILES": _SDK + "share/vulkan/icd.d/lvp_icd.json",
    },
    Label("//platforms:is_vulkan_on_system_driver"): {},
    "//conditions:default": {},
})
