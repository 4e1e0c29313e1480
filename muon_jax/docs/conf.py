"""How Sphinx builds these pages: `sphinx-build -W --keep-going -b html muon_jax/docs OUT`.

`-b linkcheck` in place of `-b html` follows the links to other sites, which needs the network.

Every page is plain Markdown, which is read as it lies, too.
"""

import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]

project = "muon-jax"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]
author = project_copyright = "The muon-jax authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["_static"]
html_title = f"{project} {release}"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages, whose pages are elsewhere
myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88


def show_formulas(app, what, name, obj, options, lines):
    """Makes indented paragraphs of docstrings literal blocks, before Napoleon reads sections."""
    del app, what, name, obj, options
    sections = r"^(?=(?:Args|Attributes|Returns|Raises|References):$)"
    text, *rest = re.split(sections, "\n".join(lines), maxsplit=1, flags=re.M)
    text = re.sub(r"^(\S.*\n\n)(?=    )", r"\1::\n\n", text, flags=re.M)
    lines[:] = "".join([text, *rest]).split("\n")


def name_the_page_outside(app, docname, source):
    """Names the contributors' page, which lies outside of this folder and is no page here."""
    del app, docname
    page = ".github/CONTRIBUTING.md"
    source[0] = source[0].replace(f"[CONTRIBUTING](../../{page})", f"`{page}`")


def setup(app):
    """Connects the above."""
    app.connect("source-read", name_the_page_outside)
    # Long lines, such as messages of errors, are not cut at the margin.
    app.add_css_file("wrap.css")
    app.connect("autodoc-process-docstring", show_formulas, priority=400)
