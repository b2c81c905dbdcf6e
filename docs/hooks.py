"""What the site's pages link to outside of docs/: pictures come along, other files are named by their path.

On a code host such links lead to the file. The site has no copy of the repository, and so nothing to lead to.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PICTURES = ("bench/data", "deploy/grafana/pictures")


def on_files(files: Any, config: Any) -> None:
    """Add the pictures that lie beside their data."""
    root = Path(config.config_file_path).parent
    for folder in PICTURES:
        for picture in sorted((root / folder).glob("*.svg")):
            files.append(
                File.generated(config, f"{folder}/{picture.name}", abs_src_path=str(picture), content=None)
            )


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Return the page with links that its site can follow, without the line that switches the language."""
    markdown = re.sub(r"(?ms)^<!-- section: (.*?) -->\n.*", lambda mark: _section(config, mark[1]), markdown)
    text = re.sub(r"(?m)\A(# .*\n\n)\[(?:中文|English)\]\([\w.-]+\)\n", r"\1", markdown)
    text = re.sub(r"(!\[[^\]]*\])\(\.\./([^)]+)\)", r"\1(\2)", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", _named, text)


def _section(config: Any, heading: str) -> str:
    """Return a section of ARCHITECTURE.md, its links as of a page in docs/."""
    text = (Path(config.config_file_path).parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.sub(r"\]\((?![a-z]+:|#)(docs/)?", lambda link: "](" if link[1] else "](../", section)


def _named(link: re.Match[str]) -> str:
    words, path = link[1], posixpath.normpath(link[2].removeprefix("../"))
    if Path(path).name in words or path in words:
        return f"`{path}`"
    return f"{words} (`{path}`)"
