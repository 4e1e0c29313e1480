"""Calls in the words of other optimizers, and what to write instead."""

import dataclasses
import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from pallas_kernels.arguments import is_integer, is_real, shown, suggestion


@dataclasses.dataclass(frozen=True)
class Foreign:
    """What to write for names that other packages have for one thing.

    Attributes:
        ways: what to write, with `{}` for the value, or `{0}` and `{1}` for those of a pair. A
            function takes the first way whose arguments it has.
        by_value: what to write for some values.
        note: why there is nothing to write, or what to do besides.
        taker: the function that takes the ways where the function that was called takes none. One
            of contrib is to be called in its place.
        chained: for `scale_by_muon`, the transformation to chain with it.
    """

    ways: tuple[str, ...] = ()
    by_value: dict[Any, str] = dataclasses.field(default_factory=dict[Any, str])
    note: str = ""
    taker: str = "muon"
    chained: str = ""


_VIEWS = "muon_weight_dimension_numbers"
_CONTRIB = "muon_jax.contrib"
# By names. A string is a way, a dict `by_value`. docs/migration.md has this table for users, with
# the packages that have the names.
_TABLE: dict[str, str | dict[Any, str] | Foreign] = {
    "lr muon_lr step_size": Foreign(
        ("learning_rate={}",), chained="optax.scale_by_learning_rate({})"
    ),
    "wd weight_decay_rate": Foreign(
        ("weight_decay={}",),
        note="adam_weight_decay is for AdamW's parameters",
        chained="optax.add_decayed_weights({})",
    ),
    "mu momentum_beta muon_momentum muon_beta muon_beta1": "beta={}",
    "adamw_lr adam_lr aux_lr scalar_lr embed_lr": "adam_learning_rate={}",
    "adam_lr_scale muon_to_adam_lr adam_lr_ratio": "adam_learning_rate=Relative({})",
    "adamw_wd adam_wd adam_decay": "adam_weight_decay={}",
    "b1 beta1 beta_1 adam_beta_1 adam_beta1 adam_momentum": "adam_b1={}",
    "b2 beta2 beta_2 adam_beta_2 adam_beta2": Foreign(("adam_b2={}", "b2={}")),
    "normuon_b2 muon_beta2": Foreign(
        ("normuon_b2={}", "b2={}"),
        taker=f"{_CONTRIB}.normuon",
        chained=f"{_CONTRIB}.scale_by_normuon(b2={{}})",
    ),
    "betas adamw_betas adam_betas": "adam_b1={0}, adam_b2={1}",
    "epsilon ns_epsilon muon_epsilon": "eps={}",
    "adamw_eps adam_epsilon": "adam_eps={}",
    "eps_root": "adam_eps_root={}",
    "mask wd_mask": Foreign(
        ("weight_decay_mask={}",),
        note="weight_decay_mask is for Muon's matrices alone. For a mask of the others, leave"
        " adam_weight_decay at 0 and chain optax.add_decayed_weights(-adam_learning_rate * decay,"
        " mask) after muon",
    ),
    "exp_avg_dtype momentum_dtype": "mu_dtype={}",
    "exp_avg_sq_dtype nu_dtype": Foreign(
        note="AdamW's second moment has the dtype of the parameters"
    ),
    "ns_coefficients coefficients coeffs": "ns_coeffs={}",
    "coefficient_type muon_coefficient_type": Foreign(
        ("ns_coeffs={}",),
        by_value={
            "simple": "ns_coeffs='standard'",
            "quintic": "ns_coeffs='dion'",
            "polar_express": "ns_coeffs='polar_express_nvidia'",
            "aol": "ns_coeffs='aol_nvidia', preconditioning='aol'",
        },
    ),
    "steps backend_steps num_ns_steps muon_num_ns_steps num_steps ns_iters num_iterations"
    " newton_schulz_steps": "ns_steps={}",
    "use_nesterov muon_use_nesterov": "nesterov={}",
    "adjust_lr_fn": {
        "match_rms_adamw": "consistent_rms=0.2",
        "original": "shape_scale='clipped_ratio'",
        None: "shape_scale='clipped_ratio'",
    },
    "adjust_lr": {
        "rms_norm": "consistent_rms=0.2",
        "spectral_norm": "shape_scale='ratio'",
        None: "shape_scale='none'",
    },
    "scale_mode muon_scale_mode": {
        "spectral": "consistent_rms=1.0",
        "unit_rms_norm": "shape_scale='ratio'",
        "shape_scaling": "shape_scale='clipped_ratio'",
    },
    "use_kimi_scaling": {True: "consistent_rms=0.2", False: "shape_scale='clipped_ratio'"},
    "extra_scale_factor muon_extra_scale_factor matched_adamw_rms rms_rate": "consistent_rms={}",
    "cautious_wd cautious": "cautious_weight_decay={}",
    "weight_decay_method": "weight_decay_form={}",
    "use_decoupled_weight_decay decoupled_weight_decay": {
        True: "weight_decay_form='decoupled'",
        False: "weight_decay_form='l2'",
    },
    "fp32_matmul_prec muon_fp32_matmul_prec": {
        "medium": "ns_coeffs=NewtonSchulz(dtype='bfloat16')",
        "high": "ns_coeffs=NewtonSchulz(dtype='float32')",
        "highest": "ns_coeffs=NewtonSchulz(dtype='float32')",
    },
    "use_gram_newton_schulz": {
        True: "ns_coeffs=NewtonSchulz(method='gram')",
        False: "ns_coeffs=NewtonSchulz(method='standard')",
    },
    "ns_algorithm": Foreign(
        by_value={
            "gram_newton_schulz": "ns_coeffs=NewtonSchulz(method='gram')",
            "standard_newton_schulz": "ns_coeffs=NewtonSchulz(method='standard')",
        },
        note="the faster form is the default",
    ),
    "use_syrk use_triton ns_use_kernels": Foreign(
        by_value={False: "ns_coeffs=NewtonSchulz(implementation='xla')"},
        note="the fastest kernels that can run are the default",
    ),
    "use_muon param_groups muon_params adamw_params exclude_layers exclude_embeddings flatten"
    " split_qkv muon_split_qkv": f"{_VIEWS}=by_role",
    "rules": f"{_VIEWS}=by_role(rules={{}})",
    "layout": f"{_VIEWS}=by_role(layout={{}})",
    "per_head": f"{_VIEWS}=by_use(fn, params, *inputs, per_head={{}})",
    "weight_dimension_numbers": f"{_VIEWS}={{}}",
    _VIEWS: "weight_dimension_numbers={}",
    "dtype ns_dtype": "ns_coeffs=NewtonSchulz(dtype={})",
    "method ns_method": "ns_coeffs=NewtonSchulz(method={})",
    "implementation": "ns_coeffs=NewtonSchulz(implementation={})",
    "max_group_bytes": "ns_coeffs=NewtonSchulz(max_group_bytes={})",
    "normuon_averaged averaged": Foreign(
        ("normuon_averaged={}", "averaged={}"),
        taker=f"{_CONTRIB}.normuon",
        chained=f"{_CONTRIB}.scale_by_normuon(averaged={{}})",
    ),
    "fixed_norms": Foreign(taker=f"{_CONTRIB}.muonh"),
    "adamh": Foreign(("adamh={}",), taker=f"{_CONTRIB}.muonh"),
    "state_memory_kind": Foreign(
        by_value={"pinned_host": f"mu_dtype={_CONTRIB}.on_host()"},
        note="the default is the memory of the device",
    ),
    "block_lr block_learning_rate": "shardings=Exchange(block_gain={} / learning_rate)",
    "block_period": "shardings=Exchange(block_period={})",
    "block_gain": "shardings=Exchange(block_gain={})",
    "distributed_gram": {
        True: "shardings=Exchange(axes='gram_or_exchange')",
        False: "shardings=Exchange(axes='exchange')",
    },
    "outside": Foreign(
        ("shardings=Exchange(axes={})",),
        by_value={
            "gram": "shardings=Exchange(axes={'tensor': 'gram'})",
            "block": "shardings=Exchange(axes={'tensor': 'block'})",
        },
    ),
    "exchange_axes": Foreign(note="shardings=Exchange({'fsdp': 'exchange', ...: 'raise'}) says it"),
    "bandwidth latency": Foreign(
        note="shardings=Exchange(links={'data': Link(50e9, 2e-5)}) says it"
    ),
    "G M grad": Foreign(("x={}",), taker="newton_schulz"),
    "qk_clip_threshold tau clip_threshold": Foreign(("threshold={}",), taker=f"{_CONTRIB}.qk_clip"),
    "qk_clip_alpha qk_clip alpha": Foreign(
        note="chain contrib.qk_clip(100.0, heads) after muon; the heads have the power"
    ),
    "rank world_size process_group distributed_mesh pg_collection tp_mode muon_tp_mode": Foreign(
        note="the optimizer reads the shardings of the parameters"
    ),
    "fused foreach capturable": Foreign(note="jax.jit compiles and fuses the whole update"),
    "differentiable": Foreign(note="jax.grad differentiates updates as they are"),
    "maximize": Foreign(
        note="to maximize, negate the gradients by optax.chain(optax.scale(-1.0), muon(...))"
    ),
    "amsgrad": Foreign(
        note="for AMSGrad, combine scale_by_muon and optax.amsgrad by optax.partition"
    ),
    "backend": Foreign(note="the backend is Newton–Schulz, with ns_coeffs and ns_steps"),
    "max_grad_norm clip_grad": Foreign(
        note="clip before, by optax.chain(optax.clip_by_global_norm(...), muon(...))"
    ),
    "warmup lr_schedule min_lr_ratio": Foreign(
        note="learning_rate takes a schedule, such as optax.warmup_cosine_decay_schedule(...)"
    ),
    "params model": Foreign(note="optimizer.init(params) takes the parameters"),
}


def _row(said: str | dict[Any, str] | Foreign) -> Foreign:
    if isinstance(said, Foreign):
        return said
    return Foreign((said,)) if isinstance(said, str) else Foreign(by_value=said)


FOREIGN = {names: _row(said) for names, said in _TABLE.items()}
# The rows by name: also by our own names, for functions that do not have them.
_ROWS = {
    way.removesuffix("={}"): row
    for row in reversed(FOREIGN.values())
    for way in row.ways
    if re.fullmatch(r"\w+=\{\}", way)
} | {name: row for names, row in FOREIGN.items() for name in names.split()}
# The words in names that say whose an argument is.
_ADAM, _MUON = {"adam", "adamw", "aux"}, {"muon", "matrix", "hidden"}
# The arguments of `optax.adamw` after the learning rate, in its order.
_ORDER_OF_ADAMW = "adam_b1 adam_b2 adam_eps adam_eps_root mu_dtype weight_decay weight_decay_mask"
_CALL = re.compile(r"(by_role|NewtonSchulz|Exchange)(?:\((.*)\))?$")
_CALL_OF_BY_USE = "by_use(loss, params, batch)"
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_call(
    function: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises where a call has names that the function lacks, or values in the place of others.

    Raises:
        TypeError: an unknown name; too many arguments by position, or one given twice; parameters
            came as a learning rate; or `by_role`, `by_use`, what it returns, an optimizer or a mesh
            came as something else.
        ValueError: a number, or another package's name, came as coefficients.
    """
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    kinds = {p.kind for p in parameters}
    takes_inputs = inspect.Parameter.VAR_POSITIONAL in kinds
    given = dict(kwargs) | dict(zip(by_position, args, strict=False))
    for name, value in given.items():
        what, way = _out_of_place(name, value, names)
        if what:
            raise TypeError(f"{name} must not be {what}: pass {way}")
    if _is_params(given.get("learning_rate")):
        _refuse_params(function, args, kwargs, given["learning_rate"], names)
    if "ns_coeffs" in given:
        place = by_position.index("ns_coeffs") if "ns_coeffs" in by_position else len(args)
        _check_coeffs(function, given["ns_coeffs"], args[place:], place, names)
    if not takes_inputs:
        _check_positions(function, args, kwargs, by_position)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        check_names(function, given, names, takes_inputs)


def check_names(
    function: str, given: Mapping[str, Any], parameters: Sequence[str], takes_inputs: bool = False
) -> None:
    """Raises TypeError where `given` has names that `parameters` lacks.

    Args:
        function: the name of the function.
        given: what the call gives, by name.
        parameters: the names of all arguments.
        takes_inputs: whether it takes the inputs of a model by position, as `by_use`.
    """
    unknown = {name: value for name, value in given.items() if name not in parameters}
    if not unknown:
        return
    if takes_inputs:
        found = [_advice_on_input(function, name, parameters) for name in unknown]
    else:
        found = _advice(function, unknown, given, parameters)
    *first, last = map(repr, unknown)
    named = f"{', '.join(first)} or {last}" if first else last
    advice = "; ".join(dict.fromkeys(filter(None, found)))
    raise TypeError(f"{function} has no argument {named}{': ' * bool(advice)}{advice}")


def _advice(
    function: str, unknown: Mapping[str, Any], given: Mapping[str, Any], parameters: Sequence[str]
) -> list[str]:
    """What to write for names, of those given, that the function does not have."""
    passed, elsewhere, others, near = [], [], [], []
    moved: dict[str, list[str]] = {}
    for name, value in unknown.items():
        row = _row_of(name, parameters)
        if row is None:
            near.append(_nearest(name, parameters))
        elif way := _way_of(row, value, parameters):
            passed.append(way)
            others += [row.note] if row.ways else []
        elif row.chained and function.startswith("scale_by"):
            elsewhere.append(f"chain {function} with {row.chained.format(written(value))}")
        elif row.taker.startswith(_CONTRIB):
            moved.setdefault(row.taker, ["..."]).extend(filter(None, [_way_of(row, value)]))
        elif way := _way_of(row, value):
            elsewhere.append(f"{row.taker} takes {way}")
        elif row.note:
            others.append(f"leave out {name}: {row.note}")
        else:
            choices = [f"{way} for {key!r}" for key, way in row.by_value.items()]
            others.append(f"in its place {', '.join(choices)}")
    text, factor = _joined(passed)
    if factor:
        others.append(
            f"shape_scale has no factor: multiply learning_rate by {factor} and divide weight_decay"
            " by it"
        )
    found = [f"pass {_with_given(text, given)}"] if passed else []
    found += [f"use {taker}({', '.join(ways)})" for taker, ways in moved.items()]
    return found + elsewhere + others + near


def _advice_on_input(function: str, name: str, parameters: Sequence[str]) -> str:
    """What to write for a name that a function of a model and its inputs does not have."""
    if name in _ROWS and any("by_role(" in way for way in _ROWS[name].ways):
        return f"leave out {name}, which the model shows"
    return _nearest(name, parameters) or (
        f"pass arrays by position, as in {function}(fn, params, x), and bind the rest to fn, as in"
        f" {function}(functools.partial(fn, train=True), params, x)"
    )


def _check_positions(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any], by_position: Sequence[str]
) -> None:
    twice = [name for name, _ in zip(by_position, args, strict=False) if name in kwargs]
    if twice:
        raise TypeError(f"{function} got {twice[0]} by position and by name: pass it once")
    if len(args) <= len(by_position):
        return
    way = "the others by name"
    if views := _shown_views(args[len(by_position)]):
        way = f"{_VIEWS}={views}"
    elif any(map(is_transformation, args)):
        way = "the parameters, and by name the arguments of muon in place of an optimizer"
    raise TypeError(
        f"{function} takes {', '.join(by_position)} by position, got {len(args)} arguments: pass"
        f" {way}"
    )


def _refuse_params(
    function: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rate: Any,
    parameters: Sequence[str],
) -> None:
    """Raises TypeError for parameters as the learning rate, with the call that makes an optimizer.

    As in PyTorch, values by position begin with the learning rate after the parameters.
    """
    values = args[2:] if args[1:2] == (None,) else args[1:]  # Dion's mesh may be None
    ways = [f"learning_rate={written(value)}" for value in values[:1]]
    ways += _ways_by_kind(values[1:], parameters)
    for name, value in kwargs.items():
        if value is rate:
            continue
        if name in parameters:
            other = way_of_other_form(name, value, parameters)
            ways.append(other or f"{name}={written(value)}")
        elif name in _ROWS:
            ways += filter(None, [_way_of(_ROWS[name], value, parameters)])
    text, _ = _joined(ways)
    if not any(way.startswith("learning_rate=") for way in ways):
        text = f"0.02, {text}" if text else "0.02"
    got = shown(rate) if isinstance(rate, jax.Array | np.ndarray) else f"a {type(rate).__name__}"
    raise TypeError(
        f"{function} takes no parameters, got {got} as learning_rate: call optimizer ="
        f" {function}({text}), and then optimizer.init(params)"
    )


def _check_coeffs(
    function: str, coeffs: Any, rest: Sequence[Any], place: int, parameters: Sequence[str]
) -> None:
    """Raises ValueError where coefficients are a number, or another package's name.

    Args:
        function: the name of the function.
        coeffs: what the call gives as `ns_coeffs`.
        rest: what it gives by position from there on; empty if it gives them by name.
        place: where they are by position.
        parameters: the names of all arguments.
    """
    if isinstance(coeffs, str) and coeffs in ("simple", "quintic"):
        way = _ROWS["coefficient_type"].by_value[coeffs]
        raise ValueError(f"ns_coeffs has another name for {coeffs!r}: pass {way}")
    is_single = coeffs is None or isinstance(coeffs, bool) or _is_number(coeffs)
    if not (is_single or _are_betas(coeffs)):
        return
    ways = _ways_by_kind(rest or [coeffs], parameters)
    # `scale_by_muon` has no learning rate.
    if not ways and _is_number(coeffs) and "beta" in parameters:
        ways = [f"optax.scale_by_learning_rate({written(coeffs)}) to optax.chain"]
    where = f" as the {_ORDINALS[place]} argument of {function}" if rest else ""
    raise ValueError(
        f"ns_coeffs must be a name or numbers (a, b, c), got {coeffs}{where}: pass"
        f" {', '.join(ways) or '(3.4445, -4.775, 2.0315)'}"
    )


def way_of_other_form(name: str, value: Any, parameters: Sequence[str]) -> str | None:
    """Returns what to write for a value that another optimizer's argument of this name has."""
    row = Foreign()
    if name in ("momentum", "nesterov") and _is_number(value) and 0 <= value < 1:
        row = _ROWS["mu"]
    elif name == "momentum" and callable(value):
        row = Foreign(("beta=... to optax.inject_hyperparams(muon), which takes schedules",))
    elif name in ("beta", "adam_b1", "adam_b2") and _are_numbers(value, 2):
        row = _ROWS["betas"]
    elif name == "eps":
        others = ("frobenius", "spectral", "aol", "schatten")
        row = Foreign(by_value={other: f"preconditioning={other!r}" for other in others})
    elif name in ("shape_scale", "consistent_rms") and value is not None:
        row = Foreign(
            by_value={True: "consistent_rms=0.2", False: "consistent_rms=None"}
            | _ROWS["adjust_lr_fn"].by_value
            | _ROWS["adjust_lr"].by_value
            | _ROWS["scale_mode"].by_value
        )
    elif name in ("ns_method", "method"):
        row = _ROWS["ns_algorithm"]
    return _way_of(row, value, parameters)


def is_transformation(value: Any) -> bool:
    """Returns whether `value` is a transformation of optax, such as an optimizer."""
    return isinstance(value, tuple) and hasattr(value, "init") and hasattr(value, "update")


def _row_of(name: str, parameters: Sequence[str]) -> Foreign | None:
    """The row of a name, or of our name that has its words in another order."""
    if name in _ROWS:
        return _ROWS[name]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    whose = {*words} & (_ADAM | _MUON)
    base = "_".join(word for word in words if word not in whose)
    for candidate in [f"adam_{base}"] if whose & _ADAM else [f"muon_{base}", base][not whose :]:
        if candidate in parameters:
            return Foreign((f"{candidate}={{}}",))
        if candidate in _ROWS:
            return _ROWS[candidate]
    return None


def _way_of(row: Foreign, value: Any, parameters: Sequence[str] | None = None) -> str | None:
    """What to write to a function with these parameters, or, without them, to the row's taker."""
    is_key = isinstance(value, str | bool | None)
    for way in [row.by_value[value]] if is_key and value in row.by_value else row.ways:
        if parameters is not None:
            # `newton_schulz` has the arguments of `NewtonSchulz` itself.
            inner = re.fullmatch(r"ns_coeffs=NewtonSchulz\((.*)\)", way)
            way = inner[1] if inner and "method" in parameters else way
            if not {*re.findall(r"(\w+)=", re.sub(r"\(.*\)", "", way))} <= {*parameters}:
                continue
        if "{0}" in way:
            pair: Any = value if _are_numbers(value, 2) else (..., ...)
            return way.format(*map(written, pair))
        return way.replace("{}", written(value))
    return None


def _joined(ways: Iterable[str]) -> tuple[str, str]:
    """The arguments of a call, each once, and the factor that a scale by shape cannot have.

    The first way for an argument counts, but all that pass something to the same call become one. A
    factor of the scale comes in place of 1. Where a scale by shape is a way, too, the factor is no
    argument; it is "" if there is none, or if it is 1.
    """
    found: dict[str, str] = {}
    for way in ways:
        for part in [way] if "(" in way else way.split(", "):
            name, _, value = part.partition("=")
            before = found.setdefault(name, value)
            calls = [_CALL.match(before), _CALL.match(value)]
            if calls[0] and calls[1] and before != value and calls[0][1] == calls[1][1]:
                inner, _ = _joined(call[2] for call in calls if call and call[2])
                found[name] = f"{calls[0][1]}({inner})"
            elif (name, before) == ("consistent_rms", "1.0"):
                found[name] = value
    factor = found.get("consistent_rms", "")
    has_factor = "shape_scale" in found and re.fullmatch(r"[\d.e-]+", factor)
    if has_factor:
        del found["consistent_rms"]
    text = ", ".join(f"{name}={value}" for name, value in found.items())
    return text, factor if has_factor and factor != "1.0" else ""


def _with_given(ways: str, given: Mapping[str, Any]) -> str:
    """The ways, with what the call or its preset says in a `NewtonSchulz` or an `Exchange`."""
    coeffs, preset = given.get("ns_coeffs"), given.get("preset")
    made = "NewtonSchulz("
    if isinstance(coeffs, str | tuple):
        made += f"{written(coeffs)}, "
    elif preset and coeffs is None:
        made = f"dataclasses.replace(PRESETS[{preset!r}]['ns_coeffs'], "
    if given.get("shardings") is not None:
        ways = ways.replace("Exchange(", "Exchange(shardings=..., ")
    return ways.replace("NewtonSchulz(", made)


def _ways_by_kind(values: Sequence[Any], parameters: Sequence[str]) -> list[str]:
    """What numbers in the order of another optimizer are, by their kind and size."""
    kinds: list[tuple[str, Any]] = []
    if values and _are_betas(values[0]):  # torch.optim.AdamW's betas, eps and weight_decay
        values = [*values[0], *values[1:2], None, None, *values[2:3]]
    for value in values:
        if _are_numbers(value, 3):
            kinds.append(("ns_coeffs", value))
        elif isinstance(value, bool):
            kinds.append(("nesterov", value))
        elif is_integer(value) and value > 1:
            kinds.append(("ns_steps", value))
        elif _is_number(value):
            small = "eps" if 0 < value < 1e-4 else "weight_decay"
            kinds.append(("beta" if value >= 0.5 else small, value))
    if [name for name, _ in kinds[:2]] == ["beta", "beta"]:
        pairs = zip(_ORDER_OF_ADAMW.split(), values, strict=False)
        kinds = [(name, value) for name, value in pairs if value is not None]
    return [f"{name}={written(value)}" for name, value in kinds if name in parameters]


def _out_of_place(name: str, value: Any, parameters: Sequence[str]) -> tuple[str, str]:
    """What a value is that no argument of this name is, and what to pass; empty for others."""
    own = (_VIEWS, "weight_dimension_numbers")
    if (made := _shown_views(value)) and (name not in own or made == _CALL_OF_BY_USE):
        views = next((view for view in own if view in parameters), _VIEWS)
        what = {"routes": "what by_use returns", _CALL_OF_BY_USE: "by_use itself"}
        return what.get(made, "by_role"), f"{views}={made}{' by name' * (name not in own)}"
    if is_transformation(value) and name not in ("transform", "params", "state"):
        return "an optimizer", "the arguments of muon by name"
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh) and name == "shardings":
        by_name = "it as mesh, by name"
        return "a mesh", by_name if "mesh" in parameters else "PartitionSpecs on its axes"
    return "", ""


def _is_params(rate: Any) -> bool:
    """Whether a learning rate is parameters, or a model of PyTorch, of linen or a tree."""
    if isinstance(rate, Mapping | list | tuple | Iterator):
        return True
    is_module = hasattr(rate, "named_parameters") or hasattr(rate, "init_with_output")
    return is_module or any(getattr(leaf, "ndim", 0) >= 2 for leaf in jax.tree.leaves(rate))


def _nearest(name: str, parameters: Sequence[str]) -> str:
    """A question after an argument whose name is nearly this one, of the same side and number."""

    def kind(of: str) -> tuple[bool, str]:
        return "adam" in of, re.sub(r"\D", "", of)

    def is_alike(known: str) -> bool:  # word by word, as `nu_dtype` and `ns_dtype` are not
        pairs = itertools.zip_longest(known.split("_"), name.split("_"), fillvalue="")
        are_alike = all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.65 for pair in pairs)
        return are_alike or known.replace("_", "") == name.replace("_", "")

    alike = [known for known in parameters if kind(known) == kind(name) and is_alike(known)]
    return suggestion(name, alike, cutoff=0.75).removeprefix(": ")


def _is_number(value: Any) -> bool:
    """Whether `value` is one real number that is known, and no boolean."""
    return is_real(value) and not isinstance(value, Tracer) and np.ndim(value) == 0


def _are_numbers(value: Any, count: int) -> bool:
    is_sequence = isinstance(value, tuple | list) and len(value) == count
    return is_sequence and all(map(_is_number, value))


def _are_betas(value: Any) -> bool:
    return _are_numbers(value, 2) and all(0 <= each < 1 for each in value)


def _shown_views(value: Any) -> str:
    """How `by_role`, a partial of it, or what `by_use` returns is written in a call.

    `by_use` itself, which must be called, is written as its call; all else is "".
    """
    inner = value
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not str(getattr(inner, "__module__", "")).startswith("muon_jax"):
        return ""
    name = getattr(inner, "__name__", type(inner).__name__)
    if name == "by_role" and inner is not value:
        words = (f"{word}={written(each)}" for word, each in value.keywords.items())
        return f"by_role({', '.join(words)})"
    calls = {"by_role": "by_role", "Routes": "routes", "by_use": _CALL_OF_BY_USE}
    return calls.get(name, "")


def written(value: Any) -> str:
    """Returns the value as it is written in a call; `...` for what is long."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and _is_number(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if views := _shown_views(value):
        return views
    if isinstance(value, tuple | list) and len(value) <= 8:
        parts = [written(each) for each in value]
        if "..." not in parts:
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    name = getattr(value, "__name__", "")
    return f"jnp.{name}" if name and hasattr(value, "dtype") else "..."  # of dtypes
