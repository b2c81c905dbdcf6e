"""Adds the chat page's JavaScript libraries to an SBOM, which knows the installed packages alone."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

LIBRARIES = Path(__file__).parents[1] / "gateway/page/static/vendor/README.md"
"""Its table has a row for each, held against the files by the tests of the page."""
_ROW = re.compile(
    r"\| `(?P<file>\S+)` \| (?P<name>\S+) \| (?P<version>\S+) \| (?P<licence>[^|]+) \|"
    r".*`(?P<sha>\w{64})` \|"
)


def components(table: str) -> list[dict[str, Any]]:
    """Return the libraries of a table as CycloneDX 1.6 components."""
    found = []
    for row in filter(None, map(_ROW.fullmatch, table.splitlines())):
        purl = f"pkg:npm/{row['name']}@{row['version']}"
        found.append(
            {
                "bom-ref": purl,
                "type": "library",
                "name": row["name"],
                "version": row["version"],
                "purl": purl,
                "licenses": [{"expression": row["licence"].replace(" or ", " OR ")}],
                "hashes": [{"alg": "SHA-256", "content": row["sha"]}],
                "description": f"{row['file']}, within the chat page",
            }
        )
    return found


def main() -> None:
    """Change a file in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sbom", type=Path)
    path: Path = parser.parse_args().sbom
    document = json.loads(path.read_text(encoding="utf-8"))
    added = components(LIBRARIES.read_text(encoding="utf-8"))
    document["components"] += added
    refs = [each["bom-ref"] for each in added]
    document["dependencies"] += [{"ref": ref} for ref in refs]
    root = document["metadata"]["component"]["bom-ref"]
    (ours,) = (each for each in document["dependencies"] if each["ref"] == root)
    ours["dependsOn"] = ours.get("dependsOn", []) + refs
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
