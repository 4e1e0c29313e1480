"""What the documents say is so: their code runs, their figures are the committed measurements."""

import argparse
import ast
import csv
import itertools
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
import muon_jax
import pallas_kernels
from benchmarks.__main__ import COMMANDS
from benchmarks._records.pages import all_pages
from benchmarks._records.tables import markdown
from benchmarks._records.training_statistics import (
    interval_half_width,
    pooled_noise,
    read_study,
)
from benchmarks._times.updates import IN_16_BITS
from muon_jax import PRESETS, contrib
from muon_jax._iteration.coefficients import NAMED, SCHEDULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = Path(benchmarks.__file__).parent / "results"
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "README.zh-CN.md",
        ROOT / ".github" / "CONTRIBUTING.md",
        *sorted(DOCS.rglob("*.md")),
    )
}
README = DOCUMENTS["README.md"]
SLOW = ("numerics.md", "migration.md", "distributed.md", "layouts.md")


@pytest.mark.parametrize(
    ("name", "code", "printed"),
    [
        pytest.param(
            name,
            *match.groups(),
            id=f"{name}-{index}",
            marks=pytest.mark.slow if name.endswith(SLOW) else [],
        )
        for name, text in DOCUMENTS.items()
        if not name.endswith("routing.md")  # tests/by_use/test_recipes.py runs these
        for index, match in enumerate(
            re.finditer(
                r"^```python\n(.*?)^```$(?:\n\nprints[^\n]*\n\n```text\n(.*?)^```$)?",
                text,
                re.S | re.M,
            )
        )
    ],
)
def test_code_runs(name, code, printed, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which code may add
    made = names_not_shown(name)
    exec(compile(code, name, "exec"), made)
    if printed:
        assert capsys.readouterr().out.strip() == printed.strip()


def names_not_shown(name: str) -> dict:
    """What a page leaves to its reader: a loss, parameters, and AdamW's learning rate."""
    if name not in ("README.md", "README.zh-CN.md", "docs/index.md", "docs/from_adamw.md"):
        return {"routes": None} if name.endswith("migration.md") else {}
    params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}

    def loss(params, batch):
        return jnp.mean((jax.nn.relu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    batch = jnp.ones((2, 4))
    routes = muon_jax.by_use(loss, params, batch)
    named = {"loss": loss, "params": params, "batch": batch, "rate": 1e-3, "routes": routes}
    return named | {"jax": jax, "muon": muon_jax.muon}


def test_commands_name_what_there_is():
    commands = "\n".join(
        re.findall(r"^```bash\n(.*?)^```$", "\n".join(DOCUMENTS.values()), re.S | re.M)
    )
    for name in re.findall(r"examples/\w+\.py", commands):
        assert (ROOT / name).is_file()
    named = {*re.findall(r"python -m benchmarks (\w+)", commands)}
    assert named and named <= {*COMMANDS}


WRAPPED = r":\ .+"  # the end of a message that names what another one is about
ADVICE = r"(?::|\\\.)\\ "  # what comes between a message's finding and its advice


def errors_raised() -> list[str]:
    """Regular expressions for the messages of all errors that the packages raise.

    Messages without words of their own, which a function makes, are left out: they match anything.
    """

    def pattern(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return re.escape(str(node.value))
        return "".join(map(pattern, node.values)) if isinstance(node, ast.JoinedStr) else ".+"

    found = [
        pattern(node.exc.args[0])
        for package in (muon_jax, pallas_kernels)
        for path in Path(package.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    return [each for each in found if re.search("[a-z]{3}", each)]


def errors_of_the_reference() -> list[str]:
    return re.findall(r"^```text\n(.*?)\n```$", (DOCS / "errors.md").read_text(), re.S | re.M)


def test_errors_of_the_reference_are_raised():
    """In whole, or up to their advice, for which the page has an ellipsis."""
    errors = errors_of_the_reference()
    patterns = errors_raised()
    assert len(errors) > 15
    said = [pattern for pattern in patterns if not pattern.endswith(WRAPPED)]
    findings = [each[: end.start()] for each in said for end in re.finditer(ADVICE, each)]
    findings = [each for each in findings if len(re.findall("[a-z]+", each)) > 3]  # says enough
    wrapping = [pattern for pattern in patterns if pattern.endswith(WRAPPED)]
    for known in (said, findings):
        inner = "|".join(known)
        known += [f"{pattern.removesuffix('.+')}(?:{inner})" for pattern in wrapping]
    for error in errors:
        finding = re.sub(r"[:.] …$", "", error)
        known = findings if finding != error else said
        assert any(re.fullmatch(pattern, finding) for pattern in known), error


def test_every_set_of_coefficients_is_on_its_page():
    text = (DOCS / "coefficients.md").read_text()
    assert [name for name in {**NAMED, **SCHEDULES} if f'`"{name}"`' not in text] == []


def test_the_readme_counts_the_published_muons():
    """Those of `preset=`, and those of contrib that are optimizers of their own."""
    assert len(PRESETS) + len([contrib.nanogpt, contrib.muonh, contrib.adamuon]) == 18
    assert "eighteen [published Muons]" in (DOCS.parent / "README.md").read_text()


def test_presets_are_those_of_the_table():
    stated = re.findall(
        r'^\| `"\w+"` \|.* \| [\d.]+ \|$', (DOCS / "parameters.md").read_text(), re.M
    )
    expected = []
    for name, given in PRESETS.items():
        rms, shape_scale = given.get("consistent_rms"), given.get("shape_scale", "clipped_ratio")
        iteration = given["ns_coeffs"]
        dtype = iteration.dtype
        cells = [
            f'`"{name}"`',
            f'`"{iteration.coeffs}"`',
            f'`"{dtype}"`' if dtype else "`None`",
            f'`"{given.get("momentum", "bias_corrected")}"`',
            "yes" if given.get("nesterov", True) else "no",
            f"`consistent_rms={rms}`" if rms else f'`"{shape_scale}"`',
            str(given.get("weight_decay", 0.0)),
        ]
        expected.append(f"| {' | '.join(cells)} |")
    assert stated == expected


def results(file: str) -> list[dict]:
    return json.loads((RESULTS / file).read_text())["measurements"]


def medians(measurement: dict, clock: str) -> dict[str, float]:
    return {name: times[clock][1] for name, times in measurement["microseconds"].items()}


# What the README calls the models of `benchmarks muon` in its tables.
MODEL_NAMES = {
    "gpt2-small": "GPT-2 small",
    "24-layers": "24 layers of width 2048",
    "qwen3-30b-a3b-experts": "128 experts of Qwen3-30B-A3B",
    "cifar10": "CIFAR-10 network, 2M",
    "brax-ppo": "Brax PPO networks, 0.3M",
}


def test_whole_steps_are_those_of_the_results():
    said = " ".join(README.split())
    fair, default = [], []
    of_device, of_wall = (README.partition(f"{clock}")[2] for clock in ("GPU time:", "wall clock,"))
    for measurement in results("muon_h200.json"):
        if measurement["model"] not in MODEL_NAMES:
            continue
        for clock, table in (("device", of_device.partition("wall clock,")[0]), ("wall", of_wall)):
            times = medians(measurement, clock)
            optax, in_16_bits, *ours = (
                times[name] / 1000 for name in ("optax", IN_16_BITS, "None", "balanced")
            )
            cells = [MODEL_NAMES[measurement["model"]], f"{optax:.3g}", f"{in_16_bits:.3g}"]
            cells += [f"{time:.3g} ({in_16_bits / time:.2f}×)" for time in ours]
            assert f"| {' | '.join(cells)} |" in table
            if clock == "device":
                fair.append(in_16_bits / ours[0])
                default.append(optax / ours[0])
    assert f"step is {min(fair):.1f} to {max(fair):.1f} times as fast as optax's" in said
    assert f"{min(default):.1f} to {max(default):.1f} times its default, on an H200" in said
    (two,) = results("sharded_h100.json")
    times = medians(two, "wall")
    optax, *ours = (f"{times[name] / 1000:.3g}" for name in ("optax", "None", "balanced"))
    assert f"the 24 layers takes {ours[0]} ms, {ours[1]} ms with" in said
    assert f"and {optax} ms with optax's default" in said


def test_steps_with_sharded_parameters_are_those_of_the_results():
    said = DOCUMENTS["docs/distributed.md"]
    one, fsdp = results("sharded_h200.json")
    (processes,), (tensor,), (replicas,) = (
        results(f"sharded_{name}_h200.json") for name in ("processes", "tensor", "data")
    )
    rows = {
        "one": one,
        "two, `fsdp=2`": fsdp,
        "the same in two processes": processes,
        "two, `tensor=2`": tensor,
        "two replicas that share the work": replicas,
    }
    meshes = [measurement["mesh"] for measurement in rows.values()]
    assert meshes == [{"fsdp": 1}, {"fsdp": 2}, {"fsdp": 2}, {"tensor": 2}, {"data": 2}]
    ratios, alone = [], medians(one, "wall")
    for name, measurement in rows.items():
        times = medians(measurement, "wall")
        timeline = measurement.get("timeline", {}).get("None", {}).values()
        numbers = [times["None"], *timeline, *[None] * (3 - len(timeline))]
        numbers += [times.get(other) for other in ("balanced", "normuon", "muonh")]
        cells = (f" {time / 1000:.1f} |" if time else " |" for time in numbers)
        assert re.search(rf"\| \[{re.escape(name)}\]\(\S+\) \|{re.escape(''.join(cells))}", said)
        if measurement is not one:
            ratios += [alone[other] / time for other, time in times.items()]
    assert f"two devices are {min(ratios):.1f} to {max(ratios):.1f} times as fast as one" in said
    said = " ".join(DOCUMENTS["docs/contrib.md"].split())
    muon, _, muonh, normuon = (f"{time / 1000:.1f}" for time in medians(one, "wall").values())
    assert f"takes {muon} ms with `muon` on one H200" in said
    assert f"{normuon} with `normuon` and {muonh} with `muonh`" in said
    (share,) = results("sharded_marin_h200.json")
    (seconds,) = medians(share, "wall").values()
    (rate,) = share["tflops"].values()
    assert f"takes {seconds * 1e-6:.3f} s for what one of eight devices has" in said
    assert f"this is {rate / 989:.0%} of the peak" in said


def test_steps_of_many_matrices_are_those_of_the_results():
    said = DOCUMENTS["docs/performance.md"]
    (measurement,) = (m for m in results("muon_h200.json") if m["model"] == "moe100m")
    for clock, words in (("device", "on the device"), ("wall", "by the wall clock")):
        optax, in_16_bits, *ours = medians(measurement, clock).values()
        cells = [f"{time / 1000:.3g}" for time in (optax, in_16_bits)]
        cells += [f"{time / 1000:.3g} ({in_16_bits / time:.2f}×)" for time in ours]
        assert f"| {words} | {' | '.join(cells)} |" in said
    launches = measurement["launches"]
    assert f"launches {launches['optax']:,} kernels in a step" in said
    assert f"and `muon` {launches['None']}, or {launches['balanced']} under" in said


def test_times_to_the_first_update_are_those_of_the_results():
    said = " ".join(README.split())
    for measurement in results("start_h200.json"):
        seconds = {name: s["all"][1] for name, s in measurement["start_seconds"].items()}
        ratio = max(seconds.values()) / seconds["optax"]
        warm = {"none": "as long to compile as optax's", "warm": "with a warm compilation cache"}
        assert f"{ratio:.1f} times {warm[measurement['cache']]}" in said


def test_times_compared_with_packages_for_torch_are_those_of_the_results():
    packages = (
        "torch.compile",
        "torch.compile, CUDA graphs",
        "gram_newton_schulz",
        "gram_newton_schulz, standard",
        "dion",
    )

    def leads(file):
        of_five_steps, of_balanced = [], []
        for measurement in results(file):
            times = medians(measurement, "wall")
            fastest = min(times[name] for name in packages if name in times)
            ours = min(times[name] for name in ("None", "standard, gram") if name in times)
            of_five_steps.append(fastest / ours)
            of_balanced.append(fastest / times["balanced"])
        return of_five_steps, of_balanced

    said = " ".join(README.split())
    five_steps, balanced = leads("newton_schulz_h100.json")
    low, high = min(five_steps), max(five_steps)
    assert f"the same five steps are {low:.2f} to {high:.2f} times as fast" in said
    assert f'`"balanced"` {min(balanced):.2f} to {max(balanced):.2f} times' in said
    lost, least, *_ = sorted(leads("newton_schulz_fused_muon_h200.json")[0])
    assert f"can shrink to {least:.2f}, and at 3584×37888 we lose by {1 - lost:.0%}" in said
    assert min(leads("newton_schulz_wide_h200.json")[0]) > least


def test_times_of_wide_matrices_are_those_of_the_results():
    for measurement in results("newton_schulz_fused_muon_h200.json"):
        m, n = measurement["shape"]
        ratios = []
        for clock in ("device", "wall"):
            times = medians(measurement, clock)
            ours = min(times["None"], times.get("standard, gram", times["None"]))
            ratios.append(times["gram_newton_schulz"] / ours)
        row = f"| {m}×{n} | {n / m:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
        is_shown = n >= 2 * m or (m, n) == (7168, 12288)
        assert (row in DOCUMENTS["docs/performance.md"]) == is_shown, row
    *_, widest = results("newton_schulz_fused_muon_h200.json")
    times = medians(widest, "device")
    share = times["balanced"] / times["gram_newton_schulz"]
    assert f'`"balanced"` takes {share:.2f} of the other' in DOCUMENTS["docs/performance.md"]


def test_speeds_of_single_products_are_those_of_the_results():
    tall_enough = [
        m for m in results("newton_schulz_fused_muon_h200.json") if m["shape"][0] >= 2048
    ]
    for product in ("XXᵀ", "cA² + bA + aI", "QX"):
        speeds = []
        for measurement in tall_enough:
            times = medians(measurement["products"][product], "device")
            speeds.append(times["jnp"] / times["None"])
        row = rf"^\| {re.escape(product)} \|.*\| {min(speeds):.2f} to {max(speeds):.2f} \|$"
        assert re.search(row, DOCUMENTS["docs/kernels.md"], re.MULTILINE), row


def test_times_of_quack_are_those_of_the_results():
    said = " ".join(DOCUMENTS["docs/kernels.md"].split())
    newest = results("newton_schulz_quack_h200.json")
    ratios = {"XXᵀ": [], "cA² + bA + aI": []}
    for measurement, (product, found) in itertools.product(newest, ratios.items()):
        times = medians(measurement["products"][product], "device")
        quack = times["quack" if product == "XXᵀ" else "quack + C"]
        if quack >= 60:
            found.append(quack / times["None"])
    of_square, of_polynomial = ratios.values()
    assert f"XXᵀ takes it {min(of_square):.2f} to {max(of_square):.2f} times as long" in said
    assert f"polynomial, {min(of_polynomial):.2f} to {max(of_polynomial):.2f} times." in said
    pairs = zip(newest, results("newton_schulz_quack_0_5_0_h200.json"), strict=True)
    small, *others = (
        medians(new, "device")["gram_newton_schulz"] / medians(old, "device")["gram_newton_schulz"]
        for new, old in pairs
    )
    assert f"steps take {min(others):.2f} to {max(others):.2f} of the time with 0.5.0" in said
    assert f"but {small:.2f} on 896×896" in said


def test_the_time_by_mma_is_that_of_the_results():
    ratios = [
        times["mosaic_gpu_mma"] / times["triton"]
        for times in (medians(m, "device") for m in results("syrk_mma_h200.json"))
    ]
    expected = f"{min(ratios):.1f} to {max(ratios):.1f} times as long there"
    assert expected in DOCUMENTS["docs/kernels.md"]


def test_units_are_those_of_the_results():
    text = DOCUMENTS["docs/coefficients.md"]
    by_default = {"standard": "bfloat16", "polar_express": "bfloat16"}
    for name in ("standard", "polar_express", "fast", "balanced", "accurate"):
        dtype = by_default.get(name, "float16")
        (units,) = (
            m["units"].values()
            for m in results("accuracy_cpu.json")
            if (m["name"], m["method"], m["dtype"]) == (name, "standard", dtype)
        )
        assert re.search(
            rf'^\| `"{name}"` \|.*\| {" / ".join(f"{u:g}" for u in units)} \|$', text, re.M
        )


def test_errors_after_aol_are_those_of_the_results():
    said = " ".join(DOCUMENTS["docs/numerics.md"].split())
    errors = {}
    for name in ("standard_after_aol", "aol", "standard"):
        (cases,) = (
            m["cases"]
            for m in results("accuracy_cpu.json")
            if (m["name"], m["method"], m["dtype"]) == (name, "standard", "bfloat16")
        )
        errors[name] = [
            np.median([c["errors"][0] for c in cases if c["spectrum"] == spectrum])
            for spectrum in ("Gaussian", "momentum, step 50")
        ]
    gaussian, momentum = errors["standard_after_aol"]
    assert f"an error of {gaussian:.2f} on a Gaussian matrix and {momentum:.2f} on momenta" in said
    assert "leaves {:.2f} and {:.2f} at the same cost".format(*errors["aol"]) in said
    assert "the Frobenius norm {:.2f} and {:.2f}.".format(*errors["standard"]) in said


def test_records_are_not_stale():
    pages = all_pages()
    for name, text in pages.items():
        assert DOCUMENTS[f"docs/records/{name}"] == text, (
            "run python -m benchmarks report --pages docs/records"
        )
    lying = {path.name for path in (DOCS / "records").glob("*.md")}
    assert lying == {*pages}


RECORDS = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_the_command_that_repeats_them(name):
    command = shlex.split(RECORDS[name]["command"])
    assert command[:3] == ["python", "-m", "benchmarks"]
    assert COMMANDS[command[3]] and command[3] == RECORDS[name]["benchmark"]
    parser = argparse.ArgumentParser()
    COMMANDS[command[3]].add_arguments(parser)
    assert RECORDS[name]["command"] in DOCUMENTS[f"docs/records/{name[:-5]}.md"]
    files = {"--json": "json", "--text": "text"}
    words = [w for i, w in enumerate(command[4:], 4) if not {w, command[i - 1]} & {*files}]
    parser.parse_args(words)  # exits where the command no longer knows a flag or a value


# What each record's errors are relative to, as the code that measures them computes them.
@pytest.mark.parametrize(
    ("benchmark", "said", "unsaid"),
    [
        ("syrk", "same product of the same inputs in float64", "one device"),
        ("newton_schulz", "same iteration of the same input in float64", "one device"),
        ("muon", "optax's update, which iterates in the dtype of the gradients", "float64"),
        ("sharded", "same optimizer, in the same precision, on one device", "float64"),
        ("start", "same update in float64, with each optimizer's own coefficients", "one device"),
        ("accuracy", "relative to the polar factor UVᵀ of its input X = UΣVᵀ in float64", "device"),
    ],
)
def test_records_say_what_their_errors_are_relative_to(benchmark, said, unsaid):
    names = [name for name, report in RECORDS.items() if report["benchmark"] == benchmark]
    assert names
    for name in names:
        page = DOCUMENTS[f"docs/records/{name[:-5]}.md"]
        (sentence,) = re.findall(r"^.*(?:\berror|Errors|‖\w+ -).*$", of_errors(page), re.M)
        assert said in sentence and unsaid not in sentence
        # What is printed says the same.
        assert sentence in markdown(RECORDS[name])


def of_errors(page: str) -> str:
    """The part of a page that is about errors to its reference."""
    text = page.partition("\n## Errors\n")[2].partition("\n## ")[0] or page
    return re.sub(r"^\|.*$", "", text, flags=re.M)


def test_losses_from_adamw_are_those_of_the_results():
    text, readme = (
        " ".join(DOCUMENTS[name].split()) for name in ("docs/from_adamw.md", "README.md")
    )
    by_task = {}
    for m in RECORDS["from_adamw_cpu.json"]["measurements"]:
        by_task.setdefault(m["task"], {}).setdefault(m["optimizer"], []).append(
            np.array(m["held_out_losses"])
        )
    assert len(by_task) == 8
    better, in_seeds, lost, either = np.zeros(3, int), np.zeros(3, int), 0, 0
    for task, losses in by_task.items():
        means = [loss.mean() for loss in losses["AdamW"]]
        best = int(np.argmin(means))
        assert best not in (0, len(means) - 1), task  # bracketed
        shown = [losses["AdamW"][best], *losses["Muon"]]
        cells = [f"{loss.mean():.3g}" for loss in [*shown, *losses["Muon at 0.02, by_use"]]]
        assert f"| {task} | {' | '.join(cells)} |" in text
        advised = np.array(losses["Muon"])
        better += advised.mean(1) < means[best]
        either += advised[:2].mean(1).min() < means[best]
        in_seeds += (advised < losses["AdamW"][best]).sum(1)
        untuned = losses["Muon at 0.02, by_use"][0].mean()
        lost += untuned > means[best]
        if task.startswith("byte"):
            pairs = zip(losses["Muon, no routing"], losses["Muon, by_use"], strict=True)
            assert all(without.mean() > routed.mean() for without, routed in pairs)
    assert f"in {better[0]} of 8 tasks, with 0.6 in {better[1]} and with 2 in {better[2]}" in text
    assert f"the better of 0.2 and 0.6 is in {either}" in text
    assert f"0.2 wins {in_seeds[0]} of 24 and 0.6 wins {in_seeds[1]}" in text
    assert f"it was better in {better[0]}, with 0.6 instead of 0.2 in {better[1]}" in readme
    assert f"the better of the two in {either}" in readme
    assert f"loses to a tuned AdamW in {lost} of 8 tasks" in text


# Where an AdamW user looks for what to write.
@pytest.mark.parametrize(
    "name",
    ["README.md", *(f"docs/{page}.md" for page in ("quickstart", "from_adamw"))],
)
def test_lines_for_users_of_adamw_route(name):
    calls = re.findall(r"\bmuon\(((?:[^()]|\([^()]*\))*)\)", DOCUMENTS[name])
    scaled = [call for call in calls if "consistent_rms=0.2" in call]
    assert scaled and all("muon_weight_dimension_numbers=routes" in call for call in scaled)
    assert "routes = by_use(" in DOCUMENTS[name]
    assert re.search(TRIED, DOCUMENTS[name])


TRIED = r"try\s+0\.6"


def test_the_reference_sends_users_of_adamw_to_the_routing():
    _, _, text = (muon_jax.muon.__doc__ or "").partition(" consistent_rms:")
    said = text.partition("preset:")[0]
    assert "by_use" in said and re.search(TRIED, said)
    assert "from_adamw.md" in DOCUMENTS["docs/muon.md"]


def test_the_api_is_not_stale():
    page = runpy.run_path(str(DOCS / "_api.py"))["page"]
    assert DOCUMENTS["docs/api.md"] == page(), "run python docs/_api.py"


@pytest.mark.parametrize("package", [muon_jax, contrib, pallas_kernels], ids=lambda p: p.__name__)
def test_the_api_tells_where_everything_public_is(package):
    text = DOCUMENTS["docs/api.md"]
    for name in package.__all__:
        signature = rf"```py\n{package.__name__}\.{name}\b[^`]+```"
        shown = rf"^#+ `{name}`\n\n{signature}\n\nSource: .*\((\S+)\)$"
        source, *others = re.findall(shown, text, re.M) or [""]
        assert source and not others, f"write {name} once in docs/_api.txt"
        code = (DOCS / source).read_text()
        assert re.search(rf"^(def |class |from .* import |)\b{name}\b", code, re.M), (name, source)


def test_the_readme_is_short():
    prose = [line for line in README.splitlines() if not line.startswith("|")]
    assert sum(len(line.split()) for line in prose) <= 900


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    text = re.sub(r"^```.*?^```$", "", DOCUMENTS[name], flags=re.S | re.M)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), (target, anchor)


def test_losses_of_the_gpt_are_those_of_the_results():
    text, rows = DOCUMENTS["docs/examples.md"], []
    runs = ("muon", "muon-balanced", "optax", "adamw")
    for run in runs:
        path = RESULTS / "gpt_h100" / run / "metrics.csv"
        *_, last = csv.DictReader(path.read_text().splitlines())
        assert last["step"] == "400"
        rows.append((f"{float(last['seconds']):.1f}", f"{float(last['held_out_loss']):.3f}"))
    assert re.findall(r"^\| .* \| (\d\d\.\d) \| (0\.\d{3}) \|$", text, re.M) == rows


def test_the_losses_allow_what_is_said_of_them():
    text = DOCUMENTS["docs/training.md"]
    study = read_study(json.loads((RESULTS / "training_widths_h100.json").read_text()))

    def difference(name, width):
        found = study.difference(name, width)
        assert found is not None
        return found

    def verdict(mean, half_width):
        worse, better = mean > half_width, mean < -half_width
        return "worse" if worse else "better" if better else "not significant"

    widths = (256, 384, 512, 768)
    rows = re.findall(r"^\| .* ((?:\| [+-]0\.\d{3}, [^|]+){4})\|$", text, re.M)
    names = ("balanced", "polar_express", "accurate", "standard_3_steps")
    nine = {key: pairs[3:] for key, pairs in study.pairs.items() if len(pairs) == 12}
    noise = pooled_noise(pairs for (_, name), pairs in nine.items() if name in names[:3])
    of_nine = interval_half_width(noise.std, 9, noise.df)
    for name, row in zip(names, rows, strict=True):
        means = [difference(name, width)[:2] for width in widths]
        assert {f"{half_width:.3f}" for _, half_width in means} == {"0.012"}
        verdicts = [verdict(*mean) for mean in means]
        cells = [f"{mean:+.3f}, {v}" for (mean, _), v in zip(means, verdicts, strict=True)]
        assert row.strip("| ").split(" | ") == cells
        assert verdicts == [verdict(nine[width, name].mean(), of_nine) for width in widths]
    for name in names[:3]:  # "fall with the width"
        by_width = [difference(name, width).mean for width in widths]
        assert by_width == sorted(by_width, reverse=True)
    assert all(
        abs(difference("balanced", width).mean - difference("polar_express", width).mean) < 0.007
        for width in widths
    )
    for name in ("standard", "balanced"):
        (row,) = re.findall(rf'^\| `"{name}"` \| (0.*) \|$', text, re.M)
        vertices = (study.vertices[width, name] for width in widths)
        assert row.split(" | ") == [f"{rate:.3g}" if rate else "" for rate in vertices]
    curves = study.trained[256, "balanced"].curves
    for rate, loss in ((0.0095137, 2.890), (0.011314, 2.875)):
        assert sum(curves[rate][i][-1] for i in range(3)) / 3 == pytest.approx(loss, abs=5e-4)
    said = " ".join(text.split())
    assert "loss of 2.890 at the reported rate, and 2.875 at the next rate" in said
    assert f"{study.noise.std:.4f} with {study.noise.df} degrees of freedom" in text


def test_the_commands_are_found_by_ci():
    commands = re.findall(r"^python3\.12 .*", README, re.M)
    assert len(commands) == 2
    assert commands[0].endswith("examples/quickstart.py")
    assert ".venv/bin/pytest" in commands[1]


def test_figures_for_tpus_are_those_of_the_results():
    text = DOCUMENTS["docs/tpus.md"]
    measured = {(m["program"], m["variant"]): m for m in results("tpu.json")}
    assert not any(m["float16"] for m in measured.values())
    for variant in ("optax", "standard", "standard, gram form", "fast", "balanced", "accurate"):
        programs = (measured[f"v5e, 4×1024×{n}", variant] for n in (1024, 4096))
        cells = (f"{m['gflops']:.0f}" for m in programs)
        assert f"| {' | '.join([variant, *cells])} |" in text
    for layout in ("replicated", "FSDP", "TP + FSDP", "EP", "stacked layers"):
        variants = ("optax", "shardings=", "explicit axes", "nobody knows")
        cells = (f"{measured[f'v5e:2x2, {layout}', name]['seconds']:.0f}" for name in variants)
        assert f"| {' | '.join([layout, *cells])} |" in text
