"""A temporary copy of a folder for a command to run in, so that what it writes there is thrown away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from batchfinder.errors import InvalidValue
from batchfinder.units import GIB, format_bytes

MOST_BYTES = 4 * GIB
_LINKED = frozenset({".git", ".hg", ".venv", "venv", "node_modules", "__pycache__"})
"""What commands read and do not write: a link will do."""
_LARGEST_TOLD = 3
_WITHOUT_A_COPY = "run it in the folder itself, where what it writes stays (find --here, or dry-run without --scratch)"


@contextlib.contextmanager
def scratch_copy(folder: Path) -> Iterator[Path]:
    """A copy of a folder beside links to all that lies beside it, so that `../data` is found; removed at the end.

    Every file is copied: a link would have a command that writes a file anew write the original.

    Raises:
        InvalidValue: there is more in it than `MOST_BYTES`, or not all of it can be copied.
    """
    folder = folder.resolve()
    sizes = {path: found.st_size for path, found in files_in(folder).items()}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:_LARGEST_TOLD]
        named = ", ".join(f"{path.relative_to(folder)} ({format_bytes(sizes[path])})" for path in largest)
        raise InvalidValue(
            "the folder",
            f"{format_bytes(total)} in {folder}",
            f"at most {format_bytes(MOST_BYTES)} to be copied, and the largest files are {named}; move data out of the "
            f"folder, or {_WITHOUT_A_COPY}",
        )
    with tempfile.TemporaryDirectory(prefix="batchfinder-scratch-", ignore_cleanup_errors=True) as made:
        made = os.path.realpath(made)
        parent = Path(made) / (folder.parent.name or "root")
        copy = parent / (folder.name or "root")
        try:
            parent.mkdir()
            _copy(folder, copy)
        except (OSError, shutil.Error) as error:
            # copytree gathers what went wrong with each file: from, to, why.
            failed = error.args[0][0] if isinstance(error, shutil.Error) else (error.filename, None, error.strerror)
            raise InvalidValue(
                "the folder",
                str(folder),
                f"one that can be copied to {made}, which failed for {failed[0]} ({failed[2]}); set TMPDIR to "
                f"where there is room, or {_WITHOUT_A_COPY}",
            ) from error
        yield copy


def _copy(folder: Path, copy: Path) -> None:
    """Copy a folder, and link what lies beside it."""
    with contextlib.suppress(PermissionError):  # then the command cannot list it either
        for beside in folder.parent.iterdir():
            if beside != folder and folder != folder.parent:
                (copy.parent / beside.name).symlink_to(beside)
    temporary = str(copy.parents[1])  # which may lie in the folder

    def left_out(path: str, names: list[str]) -> set[str]:
        return _linked_later(path, names) | {name for name in names if os.path.join(path, name) == temporary}

    shutil.copytree(folder, copy, symlinks=True, ignore=left_out, ignore_dangling_symlinks=True)
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if os.path.join(path, name) != temporary]
        for link in (Path(path, name) for name in [*names, *files]):
            if not link.is_symlink() or not os.path.isabs(os.readlink(link)):
                continue
            target = link.resolve()
            if target.is_relative_to(folder):  # it would lead out of the copy
                (copy / link.relative_to(folder)).unlink(missing_ok=True)
                (copy / link.relative_to(folder)).symlink_to(copy / target.relative_to(folder))
        for name in [name for name in names if name in _LINKED and not Path(path, name).is_symlink()]:
            names.remove(name)
            (copy / Path(path, name).relative_to(folder)).symlink_to(Path(path, name))


def _linked_later(path: str, names: list[str]) -> set[str]:
    """What is not copied: folders that are linked, and what is no file, folder or link."""
    others = {name for name in names if not Path(path, name).is_symlink() and not _is_plain(Path(path, name))}
    linked = {name for name in names if name in _LINKED and Path(path, name).is_dir()}
    return {name for name in linked if not Path(path, name).is_symlink()} | others


def _is_plain(path: Path) -> bool:
    return path.is_file() or path.is_dir()


def files_in(folder: Path) -> dict[Path, os.stat_result]:
    """Each file that is copied."""
    found: dict[Path, os.stat_result] = {}
    for path, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _LINKED]
        for name in files:
            with contextlib.suppress(OSError):
                file = Path(path, name)
                if not file.is_symlink():
                    found[file] = file.stat()
    return found
