"""The projections of `layouts.md` are what `describe` computes for these models and layouts."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import muon_jax
from muon_jax import Exchange, Link, MuonDimensionNumbers, describe

PAGE = (Path(muon_jax.__file__).parents[1] / "docs" / "layouts.md").read_text()

# The shapes of the published configurations. Embeddings and routers are AdamW's.
LLAMA = {"q": (8192, 8192), "k": (8192, 1024), "v": (8192, 1024), "o": (8192, 8192)}
LLAMA |= {"gate": (8192, 28672), "up": (8192, 28672), "down": (28672, 8192)}
KIMI = {"q_a": (7168, 1536), "q_b": (1536, 12288), "kv_a": (7168, 576), "kv_b": (512, 16384)}
KIMI |= {"o": (8192, 7168), "gate": (7168, 2048), "up": (7168, 2048), "down": (2048, 7168)}
KIMI |= {name: (384, 7168, 2048) for name in ("gates", "ups")} | {"downs": (384, 2048, 7168)}
MODELS = {"Llama 70B": (80, LLAMA), "Kimi K2": (60, KIMI)}

HOST = ("node", "gpu")
FSDP = (None, HOST)
NODES = {"node": 8, "gpu": 8}
REPLICAS = {"replica": 8, **NODES}
# By model: the layout, the mesh, the specs of matrices and of experts, the words.
CASES = {
    "Llama 70B": [
        ("FSDP", NODES, FSDP, None, ()),
        ("FSDP × tensor, blocks", NODES, (None, *HOST), None, {"gpu": "block"}),
        ("FSDP", {"node": 64, "gpu": 8}, FSDP, None, ()),
        ("HSDP, repeat", REPLICAS, FSDP, None, "repeat"),
        ("HSDP, share", REPLICAS, FSDP, None, "split"),
        ("HSDP, ZeRO-1", REPLICAS, (None, (*HOST, "replica")), None, ()),
        ("8 stages × FSDP", {"stage": 8, **NODES}, ("stage", HOST), None, ()),
        ("FSDP", {"node": 512, "gpu": 8}, FSDP, None, ()),
    ],
    "Kimi K2": [
        ("experts over all", NODES, FSDP, FSDP, ()),
        ("replicas share", REPLICAS, FSDP, FSDP, "split"),
        ("experts × FSDP over hosts", REPLICAS, FSDP, (*FSDP, "replica"), ()),
        (
            "experts × FSDP in a host",
            {"expert": 64, "gpu": 8},
            (None, ("expert", "gpu")),
            (None, "expert", "gpu"),
            (),
        ),
        (
            "experts × FSDP over 4 hosts",
            {"expert": 128, "node": 4, "gpu": 8},
            (None, ("expert", "node")),
            (None, "expert", HOST),
            (),
        ),
    ],
}


def projected(model, layout, sizes, matrices, experts, words):
    """The row of a layout. All links but those along `gpu` are between hosts."""
    layers, shapes = MODELS[model]
    params = {k: jax.ShapeDtypeStruct((layers, *s), jnp.float32) for k, s in shapes.items()}
    specs = {k: PartitionSpec(*(experts if len(s) == 3 else matrices)) for k, s in shapes.items()}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    links = {name: Link(50e9, 60e-6) for name in sizes if name != "gpu"}
    views = MuonDimensionNumbers(-2, -1)
    described = describe(
        params, Exchange(words, links, specs), mesh, muon_weight_dimension_numbers=views
    ).exchanges
    assert described is not None
    within = described.links["gpu"].bytes if "gpu" in described.links else 0
    between = sum(link.bytes for link in described.links.values()) - within
    times = described.compute_microseconds / 1e3, described.exchange_microseconds / 1e3
    cells = [str(mesh.size), layout, *(f"{ms:.1f}" for ms in times)]
    return [*cells, f"{between / 1e9:.2f}", f"{within / 1e9:.2f}"]


@pytest.mark.parametrize("model", CASES)
def test_projections_are_those_of_describe(model):
    (table,) = re.findall(rf"^\| {model}, GPUs \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert rows == [projected(model, *case) for case in CASES[model]]


def test_fsdp_and_tensor_parallelism_cost_the_same():
    """What layouts say for D devices and for T·D."""
    fsdp, both = (
        projected("Llama 70B", "", NODES, spec, None, ()) for spec in (FSDP, (None, *HOST))
    )
    assert fsdp == both
