"""Size figures of Python packages side by side: modules, functions, folders, importers and docstrings, as Markdown.

    python benchmarks/house.py batchfinder ANCHOR_FOLDER ...

An anchor is the package folder of another project's clone, such as accelerate/src/accelerate. The figures are for
comparison: one that stands out is a reason to look at the code, not a target.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

FIGURES = (
    "modules",
    "lines",
    "median module",
    "largest module",
    "mean function",
    "p95 function",
    "largest folder",
    "modules with one importer",
    "lines in docstrings",
)
SKIP = ("tests", "test_utils")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def figures(package: Path, skip: Collection[str] = SKIP) -> dict[str, str]:
    """The figures of one package; lengths in lines, docstrings and comments included.

    A module's importers are the other modules of the package with an import statement for it or for a name in it.

    Args:
        package: its folder.
        skip: names of folders to leave out.

    Raises:
        ValueError: the folder holds no Python files.
        SyntaxError: a file cannot be parsed by this Python.
    """
    paths = [path for path in sorted(package.rglob("*.py")) if not {*path.relative_to(package).parts} & {*skip}]
    if not paths:
        raise ValueError(f"no Python files under {package}")
    lines, functions, documented = {}, [], 0
    importers: defaultdict[Path, set[Path]] = defaultdict(set)
    by_name = {_module_name(path, package): path for path in paths}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
        lines[path] = text.count("\n")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.append(_length(node))
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
                documented += _length(node.body[0])
        for name in _imported(tree, path, package):
            if by_name.get(name, path) != path:
                importers[by_name[name]].add(path)
    total = sum(lines.values())
    folder, files = Counter(path.parent for path in paths).most_common(1)[0]
    lonely = sum(len(importers[path]) == 1 for path in paths if path.name != "__init__.py")
    functions.sort()
    values = (
        str(len(paths)),
        str(total),
        f"{statistics.median(lines.values()):.0f}",
        str(max(lines.values())),
        f"{statistics.mean(functions):.1f}" if functions else "",
        str(functions[int(0.95 * len(functions))]) if functions else "",
        f"{files} ({folder.relative_to(package.parent)})",
        f"{lonely} ({lonely / len(paths):.0%})",
        f"{documented / max(1, total):.1%}",
    )
    return dict(zip(FIGURES, values, strict=True))


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _length(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def _imported(tree: ast.Module, path: Path, package: Path) -> Iterator[str]:
    """Dotted names of everything a module imports, relative imports resolved; some are names within a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                here = path.relative_to(package.parent).parent.parts
                origin = ".".join([*here[: len(here) - node.level + 1], *([origin] if origin else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def table(packages: list[Path], skip: Collection[str] = SKIP) -> str:
    """A Markdown table, one row for each package."""
    lines = [f"| | {' | '.join(FIGURES)} |", f"| --- |{' ---: |' * len(FIGURES)}"]
    lines += [f"| {package.name} | {' | '.join(figures(package, skip).values())} |" for package in packages]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path, metavar="FOLDER", help="a package folder")
    parser.add_argument(
        "--skip",
        action="append",
        default=[*SKIP],
        metavar="NAME",
        help=f"leave out folders of this name, beside {' and '.join(SKIP)}; may be repeated",
    )
    arguments = parser.parse_args()
    print(table([package.resolve() for package in arguments.packages], arguments.skip))


if __name__ == "__main__":
    main()
