"""Writes docs/api.md, which lists everything public, from signatures and docstrings.

`python docs/_api.py` writes it. The text outside of sections is in docs/_api.txt.
"""

import ast
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import jax
import optax

import pallas_kernels

_PAGE = Path(__file__).with_name("api.md")
# Where it has a level, a package and names, the page has a table and sections of these names.
_TEMPLATE = Path(__file__).with_name("_api.txt").read_text()
_GROUP = re.compile(r"^(#+) ([\w.]+): ((?:.+\n)+)", re.M)
_PUBLIC = {name for *_, names in _GROUP.findall(_TEMPLATE) for name in names.split()}
_METHODS = {
    "Routes": ["__call__", "__getitem__"],
    "Implementation": [name for name in vars(pallas_kernels.Implementation) if name[0] != "_"],
}
# What has no docstring, or one of another package.
_DOCS = {
    "PRESETS": "The arguments of `muon` that make it [another Muon](parameters.md#presets),"
    " by name.",
    "IMPLEMENTATIONS": "The names of the [implementations](kernels.md#implementations).\n\n"
    + ", ".join(f'`"{name}"`' for name in pallas_kernels.IMPLEMENTATIONS)
    + ".",
    "MuonDimensionNumbers": "The rows and the columns of a parameter: the class of `optax.contrib`."
    "\n\nEach is an axis or a tuple of axes. Axes that neither names are batch axes.\n\n"
    "Attributes:\n    reduction_axis: the rows (inputs) of the parameter's matrices.\n"
    "    output_axis: their columns (outputs).",
}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|References):\n((?:(?: .*)?\n)+)", re.M)
_UNIONS = {  # of other packages, the longest first
    "optax.ScalarOrSchedule": optax.ScalarOrSchedule,
    "optax.Params": optax.Params,
    "jax.typing.DTypeLike": jax.typing.DTypeLike,
}
_aliases: dict[str, str] = {}  # all that `_type` has met, by their names


def page() -> str:
    """Returns the text of the page."""
    text = _GROUP.sub(lambda found: _group(found[1], found[2], found[3].split()), _TEMPLATE)
    lines = (f"- `{name}`: `{value}`\n" for name, value in sorted(_aliases.items()))
    return f"{text}\n{''.join(lines)}"


def _group(level: str, package: str, names: list[str]) -> str:
    """Returns a table of public names of a package, and a section for each."""
    module, rows, sections = importlib.import_module(package), [], []
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    sources = {alias.name: str(node.module) for node in imports for alias in node.names}
    for name in names:
        value, source = getattr(module, name), sources[name]
        is_ours = source.partition(".")[0] == package.partition(".")[0]
        file = f"{source if is_ours else f'{package}.__init__'}".replace(".", "/") + ".py"
        doc = _DOCS.get(name) or inspect.getdoc(value) or ""
        rows.append(f"| [`{name}`](#{name.lower()}) | {doc.partition('\n')[0].rstrip('.')} |\n")
        if callable(value):
            shown, defaults = _signature(f"{package}.{name}", value)
        else:
            hint = vars(sys.modules[source]).get("__annotations__", {}).get(name)
            shown = f"{package}.{name}" + (f": {_type(hint)}" if hint else f" = {value!r}")
            shown, defaults = shown.replace("'", '"'), {}
        sections.append(f"\n{level} `{name}`\n\n```py\n{shown}\n```\n\n")
        sections.append(f"Source: [`{file}`](../{file})\n{_markdown(doc, name, defaults)}")
        for method in _METHODS.get(name, []):
            shown, defaults = _signature(f"{name}.{method}", getattr(value, method))
            text = _markdown(inspect.getdoc(getattr(value, method)) or "", name, defaults)
            sections.append(f"\n{level}# `{name}.{method}`\n\n```py\n{shown}\n```\n{text}")
    return "| name | what it is |\n|---|---|\n" + "".join(rows + sections)


def _signature(path: str, function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns the signature, on several lines where it is long, and the defaults by name."""
    signature = inspect.signature(function)
    words, defaults = [], {}
    for p in signature.parameters.values():
        if p.name == "self" or p.name.startswith("_"):
            continue
        if p.kind == p.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        words.append(f"{stars}{p.name}: {_type(p.annotation)}")
        if p.default is not p.empty:
            default = getattr(p.default, "__name__", repr(p.default).replace("'", '"'))
            defaults[p.name] = default.replace("<factory>", "{}")
            words[-1] += f" = {defaults[p.name]}"
    returned = signature.return_annotation
    end = "" if returned in (None, signature.empty) else f" -> {_type(returned)}"
    line = f"{path}({', '.join(words)}){end}"
    lines = "".join(f"    {word},\n" for word in words)
    return line if len(line) <= 88 else f"{path}(\n{lines}){end}", defaults


def _type(hint: Any) -> str:
    """Returns a short name of a type."""
    origin, parts = typing.get_origin(hint), [*typing.get_args(hint)]
    if isinstance(hint, typing.TypeAliasType):
        if hint.__name__.startswith("_"):
            return _type(hint.__value__)
        _aliases[hint.__name__] = _type(hint.__value__)
        return hint.__name__
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, parts))}]".replace("'", '"')
    if origin in (typing.Union, types.UnionType):
        for name, union in _UNIONS.items():
            first, *others = typing.get_args(union)
            if {first, *others} <= {*parts}:
                parts[parts.index(first)] = name
                parts = [part for part in parts if part not in others]
        return " | ".join(map(_type, parts))
    if isinstance(hint, list) or origin is not None:
        inner = f"[{', '.join(map(_type, hint if isinstance(hint, list) else parts))}]"
        return inner if isinstance(hint, list) else _type(origin) + inner
    if isinstance(hint, str) or hint in (None, types.NoneType, ...):
        return hint if isinstance(hint, str) else "..." if hint is ... else "None"
    package = hint.__module__.partition(".")[0]
    for module in (package, f"{package}.sharding") if package in ("jax", "numpy", "optax") else ():
        if hasattr(sys.modules.get(module), hint.__name__):
            return f"{module}.{hint.__name__}"
    return hint.__name__


def _markdown(doc: str, name: str, defaults: dict[str, str]) -> str:
    """Returns the docstring of `name`, and its sections below titles."""
    parts, blocks = ["", "", *_SECTION.split(f"{doc}\n")], []
    for title, body, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        blocks.append(f"**{title.replace('Args', 'Arguments')}**" if title else "")
        if title in ("Returns", "References"):
            blocks.append(_blocks(dedent(body), name))
        elif title:
            items = []
            for entry in re.split(r"^(?=\S)", dedent(body), flags=re.M)[1:]:
                names, _, said = entry.partition(": ")
                said, _, rest = said.partition("\n")
                codes = (
                    f"`{f'{n}={defaults[n]}' if n in defaults else n}`" for n in names.split(", ")
                )
                said = _blocks(f"{said}\n{dedent(rest)}", name)
                items.append("- " + indent(f"{', '.join(codes)}: {said}", "  ").lstrip())
            blocks.append("\n".join(items))
        blocks.append(_blocks(text, name))
    return "".join(f"\n{block}\n" for block in blocks if block)


def _blocks(text: str, name: str) -> str:
    """Returns paragraphs, lists, tables and indented blocks of the docstring of `name`."""
    blocks = []
    for block in re.split(r"\n{2,}", text.strip("\n")):
        if block.startswith("    ") and not re.match(r" *[*-] ", block):
            try:
                ast.parse(dedent(block))
                blocks.append(f"```py\n{dedent(block)}\n```")
            except SyntaxError:
                blocks.append(f"```text\n{dedent(block)}\n```")
            continue
        # In a table, a row whose first cell is empty continues the row above.
        while row := re.search(r"^(\|.*)\n(\|  .*)$", block, re.M):
            cells = zip(row[1].split("|"), row[2].split("|"), strict=True)
            joined = (
                " ".join(f"{above.strip()} {below.strip()}".split()) for above, below in cells
            )
            block = block.replace(row[0], " | ".join(joined).strip())
        block = re.sub(r"`([^`<]+?)\s+<(\S+?)>`_", r"[\1](\2)", block)
        blocks.append(re.sub(r"`([^`]+)`", lambda code: _linked(code, name), block))
    return "\n\n".join(blocks)


def _linked(code: re.Match[str], name: str) -> str:
    """Returns code with a link to what it names, if that is public and not `name` itself."""
    named = re.fullmatch(r"(?:(?:muon_jax|contrib|pallas_kernels)\.)*(\w+)(?:\(.*\))?", code[1])
    if named is None or named[1] not in _PUBLIC - {name}:
        return code[0]
    return f"[{code[0]}](#{named[1].lower()})"


if __name__ == "__main__":
    _PAGE.write_text(page())
