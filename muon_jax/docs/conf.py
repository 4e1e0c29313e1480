"""How Sphinx builds these pages: `sphinx-build -W --keep-going -b html muon_jax/docs OUT`.

`-b linkcheck` in place of `-b html` follows the links to other sites, which needs the network.

Some pages, or parts of them, are the documents that lie beside the code. Their links, which are
relative to where they lie, are pointed here to the page that holds what they lead to.
"""

import os
import re
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]

project = "muon-jax"
release = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]
author = project_copyright = "The muon-jax authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages, whose pages are elsewhere
myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

_PAGES = {
    "muon_jax/CHANGELOG.md": "changelog.md",
    "muon_jax/NUMERICS.md": "numerics.md",
    "muon_jax/benchmarks/README.md": "benchmarks.md",
    # Headings of the README
    "#fewer-products": "parameters.md#coefficients",
    "#limits": "faq.md#limits",
    "#measured": "performance.md#measured",
    "#other-muons": "parameters.md#presets",
    "#sharded-parameters": "distributed.md",
    "#which-parameters": "muon.md#which-parameters",
}


def point_links_here(app, path, parent_docname, content):
    """Makes the links of an included document relative to this folder."""
    del app, parent_docname
    here = Path(__file__).parent
    document = (here / path).resolve()

    def link(match):
        text, target, anchor = match.groups(default="")
        if not target:
            page = _PAGES[anchor] if document == _ROOT / "README.md" else anchor
            return f"{text}({page})"
        file = (document.parent / target).resolve()
        if file.is_dir():
            return text.removeprefix("[").removesuffix("]")
        page = _PAGES.get(str(file.relative_to(_ROOT)), os.path.relpath(file, here))
        return f"{text}({page}{anchor})"

    content[0] = re.sub(r"(\[[^\]]*\])\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", link, content[0])


def show_formulas(app, what, name, obj, options, lines):
    """Makes indented paragraphs of docstrings literal blocks, before Napoleon reads sections."""
    del app, what, name, obj, options
    sections = r"^(?=(?:Args|Attributes|Returns|Raises|References):$)"
    text, *rest = re.split(sections, "\n".join(lines), maxsplit=1, flags=re.M)
    text = re.sub(r"^(\S.*\n\n)(?=    )", r"\1::\n\n", text, flags=re.M)
    lines[:] = "".join([text, *rest]).split("\n")


def setup(app):
    """Connects the above."""
    app.connect("include-read", point_links_here)
    app.connect("autodoc-process-docstring", show_formulas, priority=400)
