"""How Sphinx builds these pages: `sphinx-build -W --keep-going -b html docs OUT`.

`-b linkcheck` in place of `-b html` follows the links to other sites, which needs the network.

Every page is plain Markdown, which is read as it lies, too.
"""

import re
import tomllib
from pathlib import Path

import jax
import optax
from docutils import nodes
from sphinx.util.typing import stringify_annotation

_ROOT = Path(__file__).parents[1]

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
napoleon_use_ivar = True  # attributes in one list; signatures have their types
napoleon_attr_annotations = False
# Unions of other packages, by the names that the source has for them; the longest first.
_NAMES = {
    stringify_annotation(alias, "smart"): name
    for name, alias in {
        "ScalarOrSchedule": optax.ScalarOrSchedule,
        "ArrayTree": optax.Params,
        "DTypeLike": jax.typing.DTypeLike,
    }.items()
}
# A cell of figures or of a formula is short and has no long words. Quartiles stand below a median.
_FIGURES = re.compile(r"(?!.*([a-z]{4}|–)).{1,40}", re.DOTALL)
_WORD_JOINER = "\u2060"


def show_formulas(app, what, name, obj, options, lines):
    """Makes indented paragraphs of docstrings literal blocks, before Napoleon reads sections."""
    del app, what, name, obj, options
    text = "\n".join(lines)
    text = re.sub(r"^( *)(\S.*\n\n)(?=\1    (?! |[*-] ))", r"\1\2\1::\n\n", text, flags=re.M)
    lines[:] = text.split("\n")


def split_lines(app, what, name, obj, options, lines):
    """Gives lists below an error lines of their own: Napoleon joins all that is said of it."""
    del app, what, name, obj, options
    lines[:] = "\n".join(lines).split("\n")


def name_unions(app, what, name, obj, options, signature, returns):
    """Names unions of other packages, which signatures would spell out."""
    del app, what, name, obj, options
    for union, alias in _NAMES.items():
        signature = signature and signature.replace(union, alias)
    return signature, returns


def keep_figures_whole(app, doctree):
    """Marks cells of figures and formulas, which do not break; nor do ranges break after a dash."""
    del app
    for entry in doctree.findall(nodes.entry):
        if _FIGURES.fullmatch(entry.astext()):
            entry["classes"].append("figures")
        for text in list(entry.findall(nodes.Text)):
            text.parent.replace(text, nodes.Text(text.replace("–", f"–{_WORD_JOINER}")))


def name_the_page_outside(app, docname, source):
    """Names the contributors' page, which lies outside of this folder and is no page here."""
    del app, docname
    page = ".github/CONTRIBUTING.md"
    source[0] = source[0].replace(f"[CONTRIBUTING](../{page})", f"`{page}`")


def setup(app):
    """Connects the above."""
    app.connect("source-read", name_the_page_outside)
    app.add_css_file("pages.css")
    app.connect("autodoc-process-docstring", show_formulas, priority=400)
    app.connect("autodoc-process-docstring", split_lines, priority=600)
    app.connect("autodoc-process-signature", name_unions)
    app.connect("doctree-read", keep_figures_whole)
