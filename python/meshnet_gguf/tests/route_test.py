import pytest
from meshnet.transport import Security
from meshnet_gguf.client import Capability, LayerRange, WorkerClient, check_route
from meshnet_gguf.client import open_route as open_real_route
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.local_cluster import split_layers
from meshnet_gguf.protocol import recipe_fingerprint
from meshnet_gguf.recipe import LANE_FIELDS, mixture_of, shared_fingerprint
from meshnet_gguf.testing.scripted_head import capability

from proto.meshnet.shard.v1 import errors_pb2


def stages(*capabilities: Capability) -> list[tuple[str, Capability]]:
    return [(f"worker-{index}", item) for index, item in enumerate(capabilities)]


def refusal(*capabilities: Capability) -> MeshnetError:
    with pytest.raises(MeshnetError) as caught:
        check_route(stages(*capabilities))
    return caught.value


def layers(begin: int, end: int) -> Capability:
    return capability(LayerRange(begin, end))


def test_workers_are_put_in_layer_order() -> None:
    assert check_route(stages(layers(3, 4), layers(0, 1), layers(1, 3))) == [1, 2, 0]
    assert check_route(stages(layers(0, 4))) == [0]


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([], "at least one worker"),
        ([(0, 2)], "nobody has [2, 4)"),
        ([(1, 4)], "nobody has [0, 1)"),
        ([(0, 1), (3, 4)], "nobody has [1, 3)"),
        ([(0, 3), (2, 4)], "both have [2, 3)"),
        ([(0, 4), (0, 4)], "both have [0, 4)"),
        ([(0, 2), (2, 2), (2, 4)], "empty"),
    ],
)
def test_ranges_that_are_no_whole_model(ranges: list[tuple[int, int]], said: str) -> None:
    error = refusal(*(layers(*item) for item in ranges))
    assert error.reason == errors_pb2.REASON_ROUTE_INVALID
    assert said in error.message


def test_a_gap_names_both_neighbours() -> None:
    message = refusal(layers(0, 1), layers(3, 4)).message
    assert "worker-0 with [0, 1)" in message
    assert "worker-1 has [3, 4)" in message


def test_another_artifact_names_both_sides() -> None:
    error = refusal(layers(0, 2), capability(LayerRange(2, 4), artifact_sha256="b" * 64))
    assert error.reason == errors_pb2.REASON_ARTIFACT_MISMATCH
    for part in ("worker-0 has " + "a" * 64, "worker-1 has " + "b" * 64):
        assert part in error.message


def test_another_recipe_names_the_lines_that_differ() -> None:
    other = capability(
        LayerRange(2, 4),
        recipe={"quant": "q8", "batch_policy": "exact", "kernels": "avx2"},
        recipe_fingerprint="e" * 64,
    )
    error = refusal(layers(0, 2), other)
    assert error.reason == errors_pb2.REASON_RECIPE_MISMATCH
    assert "worker-0 runs " + "f" * 64 in error.message
    assert "worker-1 runs " + "e" * 64 in error.message
    assert "kernels ('absent' against 'avx2'), quant ('q4' against 'q8')" in error.message
    assert "batch_policy" not in error.message


CPU = {"backend": "cpu", "cpu_variant": "haswell", "kv_type": "f16"}
GPU = {"accelerator": "gpu", "backend": "vulkan", "cpu_variant": "haswell", "kv_type": "f16"}


def of_lane(recipe: dict[str, str], begin: int, end: int) -> Capability:
    fingerprint = recipe_fingerprint(recipe.items())
    return capability(LayerRange(begin, end), recipe=recipe, recipe_fingerprint=fingerprint)


def fingerprint_of(head: dict[str, str], tail: dict[str, str]) -> str:
    found = mixture_of(head, tail)
    assert found is not None
    return found.fingerprint


def test_two_lanes_need_the_fingerprint_of_exactly_their_mixture() -> None:
    both = stages(of_lane(GPU, 2, 4), of_lane(CPU, 0, 2))
    mixture = fingerprint_of(CPU, GPU)
    assert check_route(both, mixture) == [1, 0]
    other_order = fingerprint_of(GPU, CPU)
    for given in ("", "a" * 64, recipe_fingerprint(CPU.items()), other_order):
        with pytest.raises(MeshnetError) as caught:
            check_route(both, given)
        assert caught.value.reason == errors_pb2.REASON_RECIPE_MISMATCH
        assert "backend ('vulkan' against 'cpu')" in caught.value.message
        named = f"that of {given}" if given else "none"
        assert f"name the evidence for the mixture {mixture}, got {named}" in caught.value.message
    # More stages of each are the same mixture; a way back is another matter.
    three = stages(of_lane(CPU, 0, 1), of_lane(CPU, 1, 2), of_lane(GPU, 2, 4))
    assert check_route(three, mixture) == [0, 1, 2]
    back = stages(of_lane(CPU, 0, 1), of_lane(GPU, 1, 2), of_lane(CPU, 2, 4))
    with pytest.raises(MeshnetError, match="one behind the other"):
        check_route(back, mixture)


def test_lanes_that_differ_in_more_than_their_lane_are_no_mixture() -> None:
    assert mixture_of(CPU, CPU) is None
    for name, value in {"kv_type": "q8_0", "zz_new": "1"}.items():
        assert mixture_of(CPU, GPU | {name: value}) is None
    with pytest.raises(MeshnetError, match="differ in their lane alone"):
        check_route(stages(of_lane(CPU, 0, 2), of_lane(GPU | {"kv_type": "q8_0"}, 2, 4)), "a" * 64)


def test_what_lanes_have_in_common_is_all_but_the_fields_of_a_lane() -> None:
    # cc/worker/mixtures_test.cc says the same of the workers' own function.
    recipe = dict.fromkeys([*LANE_FIELDS, "kv_type"], "x")
    shared = shared_fingerprint(recipe)
    assert shared == recipe_fingerprint([("kv_type", "x")])
    for name in recipe:
        assert (shared_fingerprint(recipe | {name: "y"}) == shared) == (name in LANE_FIELDS)


def test_another_number_of_layers() -> None:
    error = refusal(layers(0, 2), capability(LayerRange(2, 5), model_layers=5))
    assert error.reason == errors_pb2.REASON_ROUTE_INVALID
    assert "4 layers" in error.message
    assert "says 5" in error.message


def test_another_boundary() -> None:
    error = refusal(layers(0, 2), capability(LayerRange(2, 4), boundary_in=("dense.residual", 2)))
    assert error.reason == errors_pb2.REASON_BOUNDARY_SCHEMA_MISMATCH


def test_layers_are_split_evenly() -> None:
    assert split_layers(30, 4) == [
        LayerRange(0, 8),
        LayerRange(8, 16),
        LayerRange(16, 23),
        LayerRange(23, 30),
    ]
    assert split_layers(3, 3) == [LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)]
    for stages_wanted in (0, 4):
        with pytest.raises(MeshnetError) as caught:
            split_layers(3, stages_wanted)
        assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID


async def test_plaintext_beyond_loopback_is_refused() -> None:
    with pytest.raises(MeshnetError, match=r"TLS for 10\.0\.0\.1:7000") as caught:
        await open_real_route(["10.0.0.1:7000"])
    assert caught.value.reason == errors_pb2.REASON_INSECURE_TRANSPORT
    worker = WorkerClient("10.0.0.1:7000", security=Security(insecure=True))
    await worker.close()


@pytest.mark.parametrize("endpoint", ["127.0.0.1", "127.0.0.1:", ":80", "a:70000", "a:-1", ""])
async def test_an_endpoint_is_host_and_port(endpoint: str) -> None:
    with pytest.raises(MeshnetError, match="HOST:PORT") as caught:
        WorkerClient(endpoint)
    assert caught.value.reason == errors_pb2.REASON_CONFIGURATION_INVALID


async def test_a_worker_that_is_not_there_is_named() -> None:
    with pytest.raises(MeshnetError, match=r"worker 127\.0\.0\.1:1:") as caught:
        await open_real_route(["127.0.0.1:1"])
    assert caught.value.reason == errors_pb2.REASON_PEER_UNREACHABLE


def test_a_recipe_with_multi_token_prediction_is_refused_by_name() -> None:
    error = refusal(
        capability(LayerRange(0, 2), recipe={"mtp": "off"}),
        capability(LayerRange(2, 4), recipe={"mtp": "draft/1"}),
    )
    assert error.reason == errors_pb2.REASON_FEATURE_UNSUPPORTED
    assert "worker-1 has a recipe with mtp=draft/1" in error.message
