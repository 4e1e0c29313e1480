"""The flags of `gpt.py`: what they leave out, and what cannot run."""

import argparse
import importlib.util
import lzma
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from gpt_model import AXES, read_text

SIZES = {
    "small": {"depth": 4, "width": 128, "heads": 4, "context": 128, "batch": 8},
    # As many parameters as the smallest GPT-2, in six layers more, since bytes need no large table.
    "128m": {"depth": 18, "width": 768, "heads": 6, "context": 1024, "batch": 64},
    # For a text of 8192 tokens, with which it has 60 million parameters.
    "60m": {"depth": 10, "width": 640, "heads": 5, "context": 1024, "batch": 32},
}
# By size. Updates of all three have the root mean square of AdamW's (`consistent_rms`), but
# orthogonal ones bear a larger step.
LEARNING_RATES = {
    "small": {"muon": 0.01, "optax": 0.01, "adamw": 0.005},
    "128m": {"muon": 0.003, "optax": 0.003, "adamw": 0.001},
    "60m": {"muon": 0.004, "optax": 0.004, "adamw": 0.001},
}


def mesh_sizes(text: str) -> dict[str, int]:
    """Parses `fsdp=2,tensor=2` to the sizes of all axes; of those it leaves out, 1."""
    given = dict(re.findall(r"(\w+)=([1-9]\d*)(?:,|$)", text))
    if ",".join(f"{name}={size}" for name, size in given.items()) != text or {*given} - {*AXES}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mesh: give sizes of {', '.join(AXES)}, such as fsdp=4 or data=2,fsdp=2"
        )
    return {axis: int(given.get(axis, 1)) for axis in AXES}


def join_processes(arguments: Sequence[str] | None) -> argparse.ArgumentParser:
    """Joins the processes that the flags name, if any, before devices are asked for anything.

    Returns a parser of the flags.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="of process 0, for several processes")
    add("--processes", type=int, help="how many there are, each started with the same flags")
    add("--process", type=int, help="which of them this is, from 0")
    options, _ = parser.parse_known_args(arguments)
    given = (options.coordinator, options.processes, options.process)
    if given == (None,) * 3:
        return parser
    if None in given:
        parser.error("--coordinator, --processes and --process go together: pass all three or none")
    if not 0 <= options.process < options.processes:
        parser.error(f"--process {options.process} must be in 0 … {options.processes - 1}")
    jax.distributed.initialize(*given)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags, fills in what they leave out and refuses what cannot run."""
    processes = join_processes(arguments)
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        description="Pretrains a GPT.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        parents=[processes],
    )
    add = parser.add_argument
    add("--optimizer", choices=LEARNING_RATES["small"], default="muon")
    add("--preset", help="of muon, a name in muon_jax.PRESETS; or muonh, nanogpt or normuon")
    add("--ns-coeffs", help="of Muon's Newton-Schulz steps, such as balanced")
    add("--preconditioning", help="of Muon, such as aol with --ns-coeffs aol")
    add("--mu-dtype", help="of Muon's momentum, such as int8")
    add("--per-head", action="store_true", help="query, key and value are a matrix for each head")
    add("--block-period", type=int, help="of muon: steps from one of whole matrices to the next")
    add("--learning-rate", type=float, help="peak; by default by optimizer and size")
    add("--adam-scale", type=float, help="scales the rate of all but the layers' matrices")
    add("--weight-decay", type=float, default=0.1, help="of the layers' matrices")
    add("--size", choices=SIZES, default="small", help="sets the five below where they are not")
    for name in SIZES["small"]:
        add(f"--{name}", type=int)
    add("--text", type=Path, help="a file of `python -m benchmarks corpus`; by default Python's")
    add("--steps", type=int, default=600)
    add("--seed", type=int, default=0, help="of parameters and data")
    add("--mesh", type=mesh_sizes, default="data=1", help=f"devices: sizes of {', '.join(AXES)}")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if on_gpu else "float32")
    add("--attention", choices=("cudnn", "xla"), default="cudnn" if on_gpu else "xla")
    add("--log-every", type=int, default=10, help="steps between waits for the device")
    add("--eval-every", type=int, default=50, help="steps between losses of held-out text")
    add("--output", type=Path, help="folder of metrics.csv and curves.png; by default in runs/")
    add("--tensorboard", action="store_true", help="write events there too")
    add("--checkpoint", type=Path, help="folder to save to, and to go on from if it has a state")
    add("--checkpoint-every", type=int, default=100, help="steps")
    parser.set_defaults(**SIZES[parser.parse_known_args(arguments)[0].size])
    options = parser.parse_args(arguments)

    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.size][options.optimizer]
    names = filter(None, (options.optimizer, options.preset, options.ns_coeffs, options.mu_dtype))
    options.output = options.output or Path("runs", "-".join(names))
    if options.preset and options.optimizer != "muon":
        parser.error(f"--preset is an argument of muon, not of {options.optimizer}: leave it out")
    for name in ("ns_coeffs", "preconditioning"):
        if getattr(options, name) and options.optimizer == "adamw":
            flag = name.replace("_", "-")
            parser.error(f"--{flag} is an argument of Muon, not of adamw: leave it out")
    if options.tensorboard and not importlib.util.find_spec("tensorboardX"):
        parser.error("--tensorboard needs tensorboardX: pip install it, or leave the flag out")
    for name in ("mu_dtype", "per_head", "block_period"):
        if getattr(options, name) and options.optimizer != "muon":
            flag = name.replace("_", "-")
            parser.error(f"--{flag} is for muon, not for {options.optimizer}: leave it out")
    if options.adam_scale is not None and not options.adam_scale >= 0:
        parser.error(f"--adam-scale {options.adam_scale} must be 0 or more")
    every = ("log_every", "eval_every", "checkpoint_every")
    for name in (*SIZES["small"], "steps", *every):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("steps", *every[1:]):
        if getattr(options, name) % options.log_every:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(options, name)} must be a multiple of"
                f" --log-every {options.log_every}"
            )
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} must be a multiple of 2 × --heads {options.heads}")
    data, fsdp, tensor = options.mesh.values()
    for name, divisor in (("batch", data * fsdp), ("width", fsdp * tensor), ("heads", tensor)):
        if getattr(options, name) % divisor:
            parser.error(
                f"--{name} {getattr(options, name)} must be a multiple of {divisor}, for the mesh"
                f" {options.mesh}"
            )
    if jax.process_count() > 1 and data * fsdp * tensor != jax.device_count():
        parser.error(
            f"--mesh {options.mesh} must have all {jax.device_count()} devices of the"
            f" {jax.process_count()} processes"
        )
    if data * fsdp * tensor > jax.device_count():
        parser.error(
            f"--mesh {options.mesh} needs {data * fsdp * tensor} devices, there are"
            f" {jax.device_count()}: pass a smaller one, or simulate them on a CPU with"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={data * fsdp * tensor}"
        )
    try:
        options.text = read_text(options.text)
    except (EOFError, KeyError, OSError, ValueError, lzma.LZMAError) as error:
        parser.error(
            f"--text {options.text} must be a file of tokens, got {error}: make it with"
            " `python -m benchmarks corpus`"
        )
    return options
