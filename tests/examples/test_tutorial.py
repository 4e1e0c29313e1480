import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "from_adamw.ipynb"
NAMES = ["AdamW", "Muon, 0.2", "Muon, 0.6", "Muon, 2"]


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs_of(notebook) -> dict[str, list]:
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def text_of(outputs) -> str:
    return "".join(output.get("text", "") for output in outputs)


def table_of(notebook) -> dict[str, tuple]:
    """The validation loss, the test loss, the test accuracy in % and the wins of each optimizer."""
    text = text_of(outputs_of(notebook)["table"])
    rows = re.findall(r"^(\S.*?)  +([\d.]+) +([\d.]+) +([\d.]+)% *(.*)$", text, re.M)
    return {name: (*map(float, numbers), wins) for name, *numbers, wins in rows}


def check_outputs(notebook) -> None:
    outputs = outputs_of(notebook)
    assert all(o.output_type != "error" for cell in outputs.values() for o in cell)
    routes = text_of(outputs["routes"])
    assert re.search(r"^blocks/\{0\.\.1\}/attention/query/kernel .* hidden +Muon", routes, re.M)
    assert re.search(r"^head/kernel .* output +None", routes, re.M)
    assert [*table_of(notebook)] == NAMES
    assert outputs["figure"][-1].data["image/png"]
    assert text_of(outputs["next"]) == "patches moved: False\nhead moved: True\n"


@pytest.mark.slow
def test_the_notebook_runs(notebook, monkeypatch):
    """One short run of a narrow model with each optimizer, in an interpreter of its own."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiled sooner
    monkeypatch.syspath_prepend(ROOT)
    (settings,) = (cell for cell in notebook.cells if cell.id == "settings")
    for full, reduced in (
        ("EPOCHS, BATCH_SIZE, WIDTH = 3, 50, 64", "EPOCHS, BATCH_SIZE, WIDTH = 1, 50, 16"),
        ("SEEDS = 3 ", "SEEDS = 1 "),
    ):
        assert full in settings.source
        settings.source = settings.source.replace(full, reduced)
    path = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = NotebookClient(
        notebook, timeout=250, kernel_name="python3", resources=path, coalesce_streams=True
    )
    client.execute()
    check_outputs(notebook)
    assert all(loss < 3.0 for _, loss, *_ in table_of(notebook).values())  # ln 10 = 2.3 is a guess


def test_the_outputs_are_those_of_a_whole_run(notebook):
    check_outputs(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]


def test_what_the_notebook_concludes_is_in_its_table(notebook):
    (conclusion,) = (cell.source for cell in notebook.cells if cell.id == "conclusion")
    said, table = " ".join(conclusion.split()), table_of(notebook)
    validation = {name: row[0] for name, row in table.items()}
    assert min(validation, key=validation.__getitem__) == "Muon, 0.6"  # 0.2 is worse, so is 2
    _, adamw, accuracy, _ = table["AdamW"]
    _, loss, best, wins = table["Muon, 0.6"]
    assert 0.45 < loss / adamw < 0.55 and wins == "3 of 3 seeds"
    assert f"about half of AdamW's test loss, {loss:.3f} instead of {adamw:.3f}" in said
    assert f"It reads {best}% of the images; AdamW reads {accuracy}%" in said


def test_links_of_the_notebook_lead_somewhere(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\((?!https?:)([^)#]+)", cell.source):
                assert (NOTEBOOK.parent / target).exists(), target
