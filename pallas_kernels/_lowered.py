"""Lowered kernels of Mosaic GPU, kept within a process and beside JAX's compilation cache.

Pallas takes up to a second to lower a kernel, in Python. JAX's cache cannot save that time, because
its key is the lowered program. A lowered kernel is one custom call, whose attributes hold the code.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from pallas_kernels import device

_TARGET = "mosaic_gpu_v2"
# The custom call's attributes. All of them but one follow from the types, or are always the same.
_KERNEL = "mhlo.backend_config"
_OTHERS = (
    "api_version backend_config call_target_name called_computations has_side_effect"
    " operand_layouts output_operand_aliases result_layouts"
).split()


def call_lowered(
    kernel: Callable[..., tuple[jax.Array, ...]], identity: str, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns what one kernel of Mosaic GPU does, and keeps the kernel once it is lowered.

    A later program with an equal call gets the same custom call. So does a later process, where
    JAX's compilation cache has a local folder. `identity` tells the kernel from every other one of
    this package for the same device and the same types of operands and results.
    """
    _version()
    jaxpr = jax.make_jaxpr(kernel)(*operands)
    return tuple(_kernel_p.bind(*operands, jaxpr=jaxpr, identity=identity))


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """A lowered kernel: what is not seen from the types of its operands and results.

    Attributes:
        attributes: strings of bytes, in base64, and booleans.
        scratch: shapes of int32 in global memory, zero at the start.
    """

    attributes: Mapping[str, str | bool]
    scratch: Sequence[Sequence[int]]

    @classmethod
    def of(cls, results: Sequence[Any], num_operands: int) -> Self | None:
        """Returns the call that has these results, or None where it has a form of another JAX."""
        call = results[0].owner
        if {*call.attributes} != {*_OTHERS, _KERNEL}:
            return None
        attributes, kernel = {}, call.attributes[_KERNEL]
        for name, value in ((kernel[i].name, kernel[i].attr) for i in range(len(kernel))):
            if isinstance(value, mlir.ir.StringAttr):
                attributes[name] = base64.b64encode(value.value_bytes).decode()
            elif isinstance(value, mlir.ir.BoolAttr):
                attributes[name] = value.value
            else:
                return None
        types = [mlir.ir.RankedTensorType(x.type) for x in [*call.operands][num_operands:]]
        has_aliases = len(types) == len(call.attributes["output_operand_aliases"])
        if not has_aliases or any(str(x.element_type) != "i32" for x in types):
            return None
        return cls(attributes, [[*x.shape] for x in types])

    def emit(self, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Sequence[Any]:
        """Adds the call to the program, and returns its results."""
        num_results = len(ctx.avals_out)
        zeros = jax.make_jaxpr(lambda: [jnp.zeros(shape, "int32") for shape in self.scratch])()
        scratch = zeros.out_avals
        aliases = {len(operands) + i: num_results + i for i in range(len(scratch))}
        rule = jax.ffi.ffi_lowering(_TARGET, operand_output_aliases=aliases)
        types = {"avals_in": [*ctx.avals_in, *scratch], "avals_out": [*ctx.avals_out, *scratch]}
        initial = mlir.lower_fun(core.jaxpr_as_fun(zeros))(ctx.replace(avals_in=()))
        attributes = {
            name: base64.b64decode(x) if isinstance(x, str) else x
            for name, x in self.attributes.items()
        }
        return [*rule(ctx.replace(**types), *operands, *initial, **attributes)][:num_results]


_kernel_p = core.Primitive("lowered_kernel")
_kernel_p.multiple_results = True
_kept: dict[str, CustomCall] = {}


@_kernel_p.def_impl
def _run(*operands: jax.Array, jaxpr: Any, identity: str) -> Sequence[jax.Array]:
    del identity
    return core.jaxpr_as_fun(jaxpr)(*operands)


@_kernel_p.def_effectful_abstract_eval
def _types(*operands: Any, jaxpr: Any, identity: str) -> tuple[Any, Any]:
    del operands, identity
    return jaxpr.out_avals, jaxpr.effects


def _lower_anew(
    ctx: mlir.LoweringRuleContext, *operands: Any, jaxpr: Any, identity: str
) -> Sequence[Any]:
    """Lowers by Pallas, which raises an error where the platform is not CUDA."""
    del identity
    return mlir.lower_fun(core.jaxpr_as_fun(jaxpr))(ctx, *operands)


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Any, jaxpr: Any, identity: str
) -> Sequence[Any]:
    """Emits the custom call that is kept, or lowers by Pallas and keeps the custom call."""
    types: Any = (ctx.avals_in, ctx.avals_out)
    operand_types, result_types = ([(x.shape, x.dtype.name) for x in side] for side in types)
    # `jax.export` asks for a kernel that older versions of JAX can read.
    settings = (ctx.is_forward_compat(), jax.config.jax_enable_x64)
    key = repr((identity, operand_types, result_types, device.current(), settings))
    if call := _kept.get(key) or _read(key):
        _kept[key] = call
        return call.emit(ctx, operands)
    results = _lower_anew(ctx, *operands, jaxpr=jaxpr, identity=identity)
    if call := CustomCall.of(results, len(operands)):
        _kept[key] = call
        _store(key, call)
    return results


mlir.register_lowering(_kernel_p, _lower_anew)
mlir.register_lowering(_kernel_p, _lower, "cuda")


@functools.cache
def _version() -> list[str]:
    """Returns the versions of JAX and of this package, by a digest, with its place.

    Kernels hold places of sources as debug information. Sources may be edited after they are
    imported: this is called as soon as a kernel is made, which is when its sources are imported.
    """
    root = Path(__file__).parent
    found = hashlib.sha256(str(root).encode())
    for path in sorted(root.rglob("*.py")):
        found.update(path.read_bytes())
    return [jax.__version__, version("jaxlib"), found.hexdigest()]


def _file_of(key: str) -> Path | None:
    """Returns where a kernel is stored, or None where nothing is: no compilation cache here."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    name = hashlib.sha256(repr((_version(), key)).encode()).hexdigest()
    return Path(folder) / "pallas_kernels" / name


def _read(key: str) -> CustomCall | None:
    """Returns the stored kernel, or None where there is none, or a file that is not whole."""
    path = _file_of(key)
    if not path:
        return None
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        return None
    fields = json.loads(content)
    return CustomCall(**fields["call"]) if fields["key"] == [*_version(), key] else None


def _store(key: str, call: CustomCall) -> None:
    """Stores a kernel where that is possible. Other processes see the whole file or none."""
    path = _file_of(key)
    if not path:
        return
    fields = {"key": [*_version(), key], "call": dataclasses.asdict(call)}
    content = json.dumps(fields).encode()
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
