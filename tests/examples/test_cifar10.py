"""The network and the recipe are airbench's, and the notebook shows what a report says.

Lines are those of https://github.com/KellerJordan/cifar10-airbench/blob/f1c599c/airbench94_muon.py.
"""

import functools
import inspect
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import oracles
import pytest
from nbclient import NotebookClient
from scipy.special import erf

import benchmarks
import cifar10
from cifar10_data import Cifar10
from muon_jax import NewtonSchulz

NOTEBOOK = Path(cifar10.__file__).with_name("cifar10.ipynb")
RECORD = Path(benchmarks.__file__).parent / "results" / "cifar10_h200" / "report.json"
DOCUMENT = NOTEBOOK.parents[1] / "docs" / "examples.md"
WIDTH = 1 / 32  # 2, 8 and 8 channels
SMALL = cifar10.Settings(epochs=2, seeds=2, airbench_seeds=2, batch_size=25, width=WIDTH)


def images_to_learn(count=100, seed=0):
    """Noise, darker by class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count).astype(np.uint8)
    images = rng.integers(0, 256, (count, 32, 32, 3)) // (1 + labels[:, None, None, None])
    return cifar10.Split(jnp.asarray(images.astype(np.uint8)), jnp.asarray(labels))


@pytest.fixture(scope="module")
def study():
    return cifar10.Study(images_to_learn(), images_to_learn(50, 1), SMALL, jnp.float32)


# -- The network, lines 183 to 261 -----------------------------------------------------------------


def convolve(x, w, pad):
    """Of images (n, height, width, in) with filters (height, width, in, out)."""
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[:2], axis=(1, 2))
    return np.einsum("nhwcij,ijco->nhwo", windows, w)


def gelu(x):
    return x * (1 + erf(x / math.sqrt(2))) / 2


def network(params, filters, images, stats, train):
    """Logits, and the running statistics after a batch; dropout, scales and biases: none."""
    x = gelu(convolve(images, filters, 0) + params["whitening_bias"])
    new = {}
    for group in ("ConvGroup_0", "ConvGroup_1", "ConvGroup_2"):
        for i in (0, 1):
            x = convolve(x, params[group][f"Conv_{i}"]["kernel"], 1)
            if i == 0:  # only the first convolution is pooled
                n, height, width, channels = x.shape
                x = x[:, : height // 2 * 2, : width // 2 * 2]
                x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
            norm, flat = f"BatchNorm_{i}", x.reshape(-1, x.shape[-1])
            old = stats[group][norm]
            mean, var = (flat.mean(0), flat.var(0)) if train else (old["mean"], old["var"])
            new[group, norm] = 0.6 * old["mean"] + 0.4 * mean, 0.6 * old["var"] + 0.4 * var
            x = gelu((x - mean) / np.sqrt(var + 1e-12) + params[group][norm]["bias"])
    x = x.max(axis=(1, 2))
    return x @ params["head"]["kernel"] / x.shape[-1], new


def in_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("train", [True, False])
def test_the_network_is_airbenchs(train, study):
    variables = study.variables(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 30))
    variables = jax.tree.map(  # biases and statistics are not at their first values
        lambda x: x + 0.1 * jax.random.uniform(next(keys), x.shape), variables
    )
    images = cifar10.normalize(images_to_learn(4).images)
    logits, updated = study.network.apply(
        variables, images, study.filters, train, mutable=["batch_stats"]
    )
    params, stats, filters, images = in_float64(
        (variables["params"], variables["batch_stats"], study.filters, images)
    )
    expected, new = network(params, filters, images, stats, train)
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())
    if train:
        for (group, norm), (mean, var) in new.items():
            found = updated["batch_stats"][group][norm]
            np.testing.assert_allclose(found["mean"], mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found["var"], var, rtol=1e-4)


def test_parameters_start_as_airbenchs():
    """Lines 191 to 196 and 242 to 245, at a width of 1; torch draws biases from ±1/√(2·2·3)."""
    settings = cifar10.Settings(batch_size=1)
    study = cifar10.Study(images_to_learn(10), images_to_learn(10), settings, jnp.float32)
    params = study.variables(jax.random.key(0))["params"]
    filters = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    biases = 24 + 2 * (64 + 256 + 256)
    assert sum(x.size for x in jax.tree.leaves(params)) == filters + biases + 256 * 10
    assert np.std(params["head"]["kernel"], ddof=1) == pytest.approx(1, abs=1e-5)
    bias = np.asarray(params["whitening_bias"])
    assert 0.2 < np.abs(bias).max() <= 1 / math.sqrt(12)
    kernel = np.asarray(params["ConvGroup_1"]["Conv_0"]["kernel"])  # 3×3×64×256
    identity = np.zeros((3, 3, 64, 64))
    identity[1, 1] = np.eye(64)
    np.testing.assert_array_equal(kernel[..., :64], identity)
    limit = 1 / math.sqrt(9 * 64)
    assert 0.99 * limit < np.abs(kernel[..., 64:]).max() <= limit


def test_filters_whiten_patches():
    """Lines 247 to 254: second moments become v/(v + 5e-4), for the principal axes' variances v."""
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3)).cumsum(axis=2) // 32
    images = images.astype(np.uint8)
    filters = np.asarray(cifar10.whitening_filters(images), np.float64)
    np.testing.assert_array_equal(filters[..., 12:], -filters[..., :12])
    normalized = (images / 255.0 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    outputs = convolve(normalized, filters[..., :12], 0).reshape(-1, 12)
    variances = np.linalg.norm(outputs, axis=0) ** 2 / len(outputs)
    np.testing.assert_allclose(outputs.T @ outputs / len(outputs), np.diag(variances), atol=1e-3)
    v = variances * 5e-4 / (1 - variances)
    np.testing.assert_allclose(variances, v / (v + 5e-4))
    assert variances[-1] == pytest.approx(1, abs=1e-3) and np.all(np.diff(v) > -1e-6)


def test_labels_are_smoothed():
    """As by F.cross_entropy(label_smoothing=0.2), line 399."""
    logits = np.random.default_rng(0).normal(size=(5, 10))
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    labels = np.array([0, 3, 9, 9, 1])
    expected = -(0.8 * logs[np.arange(5), labels] + 0.2 * logs.mean(axis=1))
    np.testing.assert_allclose(cifar10.losses_of(logits, labels), expected, rtol=1e-5)


# -- Images ----------------------------------------------------------------------------------------


def test_images_are_shifted_by_up_to_two_pixels():
    images = np.random.default_rng(0).normal(size=(60, 32, 32, 3)).astype(np.float32)
    mirrored = np.arange(60) % 2 == 0
    cropped = np.asarray(cifar10.augment(jax.random.key(0), images, mirrored))
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), "reflect")
    padded[mirrored] = padded[mirrored, :, ::-1]
    found = set()
    for image, original in zip(cropped, padded, strict=True):
        (corner,) = (
            (y, x)
            for y in range(5)
            for x in range(5)
            if np.array_equal(image, original[y : y + 32, x : x + 32])
        )
        found.add(corner)
    assert len(found) > 15


def test_six_views():
    """Lines 310 to 325, where a view's logits are those of its mirror image, too."""
    rng = np.random.default_rng(0)
    images, weights = rng.normal(size=(3, 32, 32, 3)), rng.normal(size=(32, 32, 3, 10))

    def logits_of(x):
        return np.tensordot(x, weights, 3)

    def with_mirror(x):
        return 0.5 * logits_of(x) + 0.5 * logits_of(x[:, :, ::-1])

    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), "reflect")
    shifted = [padded[:, :32, :32], padded[:, 2:34, 2:34]]
    expected = 0.5 * with_mirror(images) + 0.5 * np.mean([with_mirror(x) for x in shifted], axis=0)
    found = cifar10.over_views(lambda x: jnp.tensordot(x, weights, 3), jnp.asarray(images))
    np.testing.assert_allclose(found, expected, atol=1e-3)


# -- Optimizers ------------------------------------------------------------------------------------


def airbench_in_numpy(params, gradients, steps):
    """Lines 67 to 85 and 339 to 405: the parameters after each step, matrices as (out, in)."""
    params, momenta = dict(params), {}
    batch_size, bias_lr, head_lr = 2000, 0.053, 0.67
    wd, whitening_steps = 2e-6 * batch_size, math.ceil(steps / 8 * 3)
    for step, by_name in enumerate(gradients):
        for name, g in by_name.items():
            p = params[name]
            if p.ndim == 4:
                momenta[name] = m = 0.6 * momenta.get(name, 0) + g
                p = p * len(p) ** 0.5 / np.linalg.norm(p)
                u = (g + 0.6 * m).reshape(len(g), -1)
                u = oracles.newton_schulz(u / (np.linalg.norm(u) + 1e-7), oracles.SIMPLE[:3])
                params[name] = p - 0.24 * (1 - step / steps) * u.reshape(p.shape)
                continue
            rate = head_lr if name == "head" else bias_lr
            g = g + wd / rate * p
            momenta[name] = m = 0.85 * momenta.get(name, 0) + g
            until = whitening_steps if name == "whitening_bias" else steps
            params[name] = p - rate * max(0.0, 1 - step / until) * (g + 0.85 * m)
    return params


def test_airbenchs_optimizers(study, monkeypatch):
    exact = NewtonSchulz(dtype="float32", method="standard")
    in_float32 = functools.partial(cifar10.scale_by_muon, ns_coeffs=exact)
    monkeypatch.setattr(cifar10, "scale_by_muon", in_float32)
    params = study.variables(jax.random.key(0))["params"]
    steps, rng = 16, np.random.default_rng(0)
    gradients = [jax.tree.map(lambda x: rng.normal(size=x.shape), params) for _ in range(9)]

    def as_in_torch(tree):
        found = {"whitening_bias": tree["whitening_bias"], "head": tree["head"]["kernel"].T}
        for i in range(3):
            for name, leaves in tree[f"ConvGroup_{i}"].items():
                (leaf,) = leaves.values()
                leaf = leaf.transpose(3, 2, 0, 1) if leaf.ndim == 4 else leaf
                found[f"{i}/{name}"] = leaf
        return found

    optimizer = cifar10.airbench(steps, study.routes)
    update, state, ours = jax.jit(optimizer.update), optimizer.init(params), params
    for gradient in gradients:
        gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient)
        updates, state = update(gradient, state, ours)
        ours = optax.apply_updates(ours, updates)
    expected = airbench_in_numpy(
        as_in_torch(in_float64(params)), map(as_in_torch, gradients), steps
    )
    for name, found in as_in_torch(in_float64(ours)).items():
        np.testing.assert_allclose(found, expected[name], atol=2e-5, err_msg=name)


def test_rates_rise_and_fall(study):
    """A parameter of AdamW moves by its rate while gradients stay the same."""
    steps = 20
    optimizer = cifar10.make_optimizer("AdamW", (0.1, 5.0), steps, study.routes)
    params = jax.tree.map(jnp.zeros_like, study.variables(jax.random.key(0))["params"])
    gradients = jax.tree.map(jnp.ones_like, params)
    state, update, moved = optimizer.init(params), jax.jit(optimizer.update), []
    for _ in range(steps):
        updates, state = update(gradients, state, params)
        moved.append(-float(updates["whitening_bias"][0]))
    expected = 0.1 * np.interp(np.arange(steps), [0, 4, 20], [0, 1, 0])
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)


# -- Reports ---------------------------------------------------------------------------------------


def made_up(ours=0.9, exact=0.001):
    """A report whose accuracies, differences and times are known."""
    epochs = np.arange(1, 3)

    def run(accuracy, offset=0.0):
        return [[0.5 * e, 2 - 0.1 * e, 1.5 - 0.1 * e + offset, accuracy * e / 2] for e in epochs]

    accuracies = {"AdamW": 0.8, "optax's Muon": 0.9, "muon": ours, "muon, balanced": 0.85}
    runs = {name: [run(a), run(a + 0.02, 0.25)] for name, a in accuracies.items()}
    return {
        **cifar10.environment(),
        "dtype": "float16",
        "settings": {"epochs": 2, "seeds": 2},
        "verified": True,
        "rates": dict.fromkeys(accuracies, 0.1),
        "runs": runs | {"airbench": [run(0.93), run(0.94)]},
        "views": [0.945, 0.947],
        "search": [["muon", 0.2, 1.25], ["AdamW", 0.1, 1.5]],
        "optimizer_ms": dict(zip(cifar10.TIMED, (1.0, 8.0, 6.0, 4.0, 2.0), strict=True)),
        "equivalent": dict(
            zip(cifar10.EQUIVALENT, (run(0.9), run(0.9, exact), run(0.9, 0.05)), strict=True)
        ),
    }


def test_what_is_concluded():
    said = cifar10.conclusion(made_up())
    assert "optax's Muon has the highest mean test accuracy of the four, 91.00% over 2" in said
    assert "are 0.00 points apart, and the larger standard deviation of the two is 1.00." in said
    assert "has 94.60% with six views of each image, the mean of 2 runs with a" in said
    assert "standard error of 0.10, and 93.50% with each image once." in said
    assert "differ by 1.0e-03 at most, those of `muon` in 16 bits by 5.0e-02" in said
    assert "Seeds of optax's Muon differ by up to 2.5e-01." in said
    assert "take `muon` 4.00 ms, `balanced` 2.00 ms, optax's Muon 8.00 ms (6.00 ms" in said
    assert "1.50 times `muon`'s) and AdamW 1.00 ms. An epoch of `muon` takes 500 ms" in said
    other = cifar10.conclusion(made_up(ours=0.96, exact=0.3))
    assert "muon has the highest mean" in other
    assert "6.00 points apart" in other and "differ by 3.0e-01 at most" in other


def test_tables_and_figure(tmp_path, capsys):
    path, png = tmp_path / "report.json", tmp_path / "report.png"
    path.write_text(json.dumps(made_up()))
    cifar10.main(["--show", str(path), "--png", str(png)])
    printed = capsys.readouterr().out
    assert "| muon | 0.1 | 91.00 ± 1.00% | 1.4250 ± 0.1250 | 1.00 s | 8.0 ms |" in printed
    assert "| six views of each | 94.60 ± 0.10% |" in printed
    assert printed.index("| AdamW | 0.1 | 1.5000 |") < printed.index("| muon | 0.2 | 1.2500 |")
    assert printed.rstrip().endswith(cifar10.conclusion(made_up()))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_wrong_settings_are_refused(capsys):
    with pytest.raises(SystemExit):
        cifar10.main(["--airbench-seeds", "0"])
    assert "airbench_seeds must be positive" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"batch of 2000 needs as many training images, got 100"):
        cifar10.Study(images_to_learn(), images_to_learn(), cifar10.Settings(), jnp.float32)


def execute(tmp_path, monkeypatch, report):
    """The outputs of the notebook for a report, by cell."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.id == "report")
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    cell.source = cell.source.replace("../benchmarks/results/cifar10_h200/report.json", str(path))
    assert str(path) in cell.source
    monkeypatch.syspath_prepend(NOTEBOOK.parents[1])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    client = NotebookClient(
        notebook, timeout=250, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    return outputs_of(notebook)


def outputs_of(notebook):
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


@pytest.mark.slow
def test_the_notebook_shows_a_report(tmp_path, monkeypatch):
    report = made_up()
    outputs = execute(tmp_path, monkeypatch, report)
    (tables,), (conclusion,) = outputs["tables"], outputs["conclusion"]
    assert tables["data"]["text/markdown"] == cifar10.tables(report)
    assert conclusion["text"].rstrip() == cifar10.conclusion(report)
    assert outputs["figure"][-1]["data"]["image/png"]
    assert "def airbench(steps, routes)" in outputs["airbench"][0]["text"]


@pytest.mark.nightly
def test_it_measures(tmp_path, monkeypatch, capsys):
    train, test = images_to_learn(), images_to_learn(50, 1)
    images = Cifar10(*map(np.asarray, (*train, *test)), {})
    monkeypatch.setattr(cifar10, "load", lambda: images)
    flags = "--epochs 2 --seeds 2 --airbench-seeds 2 --batch-size 25 --tune".split()
    path, png = tmp_path / "report.json", tmp_path / "report.png"
    cifar10.main([*flags, "--width", str(WIDTH), "--json", str(path), "--png", str(png)])
    printed = capsys.readouterr().out
    assert "100 training and 50 test images" in printed and "not the images of CIFAR-10" in printed
    report = json.loads(path.read_text())
    assert not report["verified"] and [*report["runs"]] == [*cifar10.LEARNING_RATES, "airbench"]
    for name, runs in report["runs"].items():
        assert np.shape(runs) == (2, 2, 4) and np.isfinite(runs).all(), name
        assert np.mean(runs, axis=0)[-1, 1] < 2.5  # ln 10 = 2.3 is a guess
    # The best rate of each search is its own least loss.
    for name, rate in report["rates"].items():
        tried = {r: loss for n, r, loss in report["search"] if n == name}
        assert len(tried) >= 3 and rate == min(tried, key=tried.__getitem__)
    assert {*report["optimizer_ms"]} == {*cifar10.TIMED}
    far = cifar10.differences(report)
    assert far['muon, preset="optax"'] < 1e-3 < far["seeds"]
    assert png.read_bytes().startswith(b"\x89PNG")
    cifar10.main(["--show", str(path)])
    assert printed.endswith(capsys.readouterr().out)


def test_the_notebook_and_the_page_show_the_record():
    report = json.loads(RECORD.read_text())
    assert report["verified"] and report["rates"] == cifar10.LEARNING_RATES
    outputs = outputs_of(nbformat.read(NOTEBOOK, as_version=4))
    (tables,), (said,), (code,) = (outputs[id] for id in ("tables", "conclusion", "airbench"))
    assert tables["data"]["text/markdown"] == cifar10.tables(report)
    assert said["text"].rstrip() == cifar10.conclusion(report)
    assert code["text"].rstrip() == inspect.getsource(cifar10.airbench).rstrip()
    page = DOCUMENT.read_text()
    accuracies, views, *_ = cifar10.tables(report).split("\n\n")
    assert accuracies in page and views in page
    assert re.search(rf"\b{report['jax']}\b", page) and report["commit"] in page
