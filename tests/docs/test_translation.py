"""The Chinese README has the code, the numbers and the links of the English one."""

import collections
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
)
CODE = re.compile(r"^```\w*\n.*?^```$", re.S | re.M)


def without_comments(block: str) -> str:
    """Comments are prose."""
    return re.sub(r"\s*#.*", "", block)


def test_code_is_the_same():
    english, chinese = (
        [without_comments(b) for b in CODE.findall(text)] for text in (ENGLISH, CHINESE)
    )
    assert chinese == english


def test_numbers_are_the_same():
    english, chinese = (
        collections.Counter(re.findall(r"\d+(?:\.\d+)?", CODE.sub("", text)))
        for text in (ENGLISH, CHINESE)
    )
    assert chinese == english


def test_links_are_the_same():
    english, chinese = (
        collections.Counter(re.findall(r"\]\(([^)]+)\)", CODE.sub("", text)))
        for text in (ENGLISH, CHINESE)
    )
    # Each names the other, and headings have other anchors.
    for links in (english, chinese):
        for link in [link for link in links if link.startswith(("README", "#"))]:
            del links[link]
    assert chinese == english
