"""How Sphinx builds these pages: `sphinx-build -W --keep-going -b html docs OUT`.

`-b linkcheck` in place of `-b html` follows the links to other sites, which needs the network.

Every page is plain Markdown, which is read as it lies, too.
"""

import json
import re
import tomllib
from pathlib import Path

from docutils import nodes

_ROOT = Path(__file__).parents[1]

project = "muon-jax"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]
author = project_copyright = "The muon-jax authors"

extensions = ["myst_parser"]
html_theme = "furo"
html_static_path = ["_static"]
html_title = f"{project} {release}"
nitpicky = True
myst_heading_anchors = 4
# A cell of figures or of a formula is short and has no long words. Quartiles stand below a median.
_FIGURES = re.compile(r"(?!.*([a-z]{4}|–)).{1,40}", re.DOTALL)
_WORD_JOINER = "\u2060"


def keep_figures_whole(app, doctree):
    """Marks cells of figures and formulas, which do not break; nor do ranges break after a dash."""
    del app
    for entry in doctree.findall(nodes.entry):
        if _FIGURES.fullmatch(entry.astext()):
            entry["classes"].append("figures")
        for text in list(entry.findall(nodes.Text)):
            text.parent.replace(text, nodes.Text(text.replace("–", f"–{_WORD_JOINER}")))


def show_notebook(app, docname, source):
    """Adds the notebook, with its outputs, to the page that links to it."""
    del app
    if docname == "tutorial":
        source[0] += _as_markdown(_ROOT / "examples" / "from_adamw.ipynb")


def _as_markdown(path):
    """Returns the cells of a notebook below its title. The outputs are text and PNGs."""
    blocks, heading = [], ""
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(re.sub(r"^# .*", "", text))
            heading = "".join(re.findall(r"^#+ (.*)", text, re.M)) or heading
            continue
        blocks.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                blocks.append(f"```text\n{''.join(output['text'])}```")
            else:
                png = "".join(output["data"]["image/png"].split())
                blocks.append(f"![{heading}](data:image/png;base64,{png})")
    return "\n\n".join(["", *blocks, ""])


def hide_records(app, docname, source):
    """Keeps records out of the search, which would find their many words first."""
    del source
    if docname.startswith("records/"):
        app.env.metadata[docname]["nosearch"] = True


def setup(app):
    """Connects the above."""
    app.connect("source-read", show_notebook)
    app.connect("source-read", hide_records)
    app.add_css_file("pages.css")
    app.connect("doctree-read", keep_figures_whole)
