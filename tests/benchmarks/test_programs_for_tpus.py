"""What is read in programs compiled for TPUs, without the compiler."""

import importlib.util

import pytest
from jax.sharding import PartitionSpec

from benchmarks import __main__ as benchmarks
from benchmarks._records.tables import markdown
from benchmarks._tpu.described import exchanges, has_float16
from benchmarks._tpu.layouts import layouts_on_pod

PROGRAM = """\
%async_collective_fusion.1 (p: bf16[8,4]) -> bf16[32,4] {
  %all-gather.1 = bf16[32,4]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}
%fused_computation.2 (p: bf16[8,4]) -> bf16[32,4] {
  %all-gather.2 = bf16[32,4]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}
ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %all_to_all.3 = bf16[4,2,4]{2,1,0} all-to-all(%p), channel_id=1
  %all_to_all.4 = bf16[4,2,4]{2,1,0} all-to-all(%q), channel_id=1
  %all-reduce-start = f32[] all-reduce-start(%r), channel_id=2
}
"""


class Compiled:
    def as_text(self):
        return PROGRAM


def test_a_collective_that_is_fused_several_times_is_one():
    assert exchanges(Compiled()) == {
        "all-gather": (1, 2 * 32 * 4),
        "all-reduce": (1, 4),
        "all-to-all": (2, 2 * 2 * 32),
    }
    assert not has_float16(Compiled())


def test_layouts_on_a_pod_are_sharded_as_their_names_say():
    layouts = layouts_on_pod(64)
    for layout in layouts.values():
        assert {*layout.shapes} == {*layout.specs}
    assert layouts["TP + FSDP"].specs["layer_1/down"] == PartitionSpec("tp", "fsdp")
    assert layouts["stacked layers"].specs["up"] == PartitionSpec(None, "fsdp", "tp")


def test_without_the_compiler_the_command_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --group tpu"):
        benchmarks.main(["tpu", "--quick"])


def test_a_report_has_a_row_for_each_program():
    found = {"gflops": 1.25, "collectives": {"all-to-all": 2}, "exchanged_bytes": 2_000_000}
    found |= {"temp_bytes": 500_000, "float16": False, "seconds": 3.04}
    measurement = {"program": "v5e:2x2, FSDP", "variant": "shardings=", **found}
    *_, row = markdown({"benchmark": "tpu", "measurements": [measurement]}).splitlines()
    assert row == "| v5e:2x2, FSDP | shardings= | 1.25 | 2 all-to-all | 2.00 | 0.50 | no | 3.0 |"
