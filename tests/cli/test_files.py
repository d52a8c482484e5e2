"""Tests of batchfinder/cli/files.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.cli.files import write_file
from batchfinder.errors import InvalidValue


@pytest.mark.parametrize("content", ["zwölf\n", b"\x80\x04."])
def test_written_as_it_is(content: str | bytes, tmp_path: Path) -> None:
    """Bytes are written unchanged, text as UTF-8, over what was there."""
    path = tmp_path / "file"
    path.write_text("something longer than that")
    write_file("--snapshot", str(path), content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode("utf-8"))


def test_no_room(tmp_path: Path) -> None:
    """What goes wrong in the writing is said with the path and the system's reason."""
    link = tmp_path / "step.pickle"
    link.symlink_to("/dev/full")
    with pytest.raises(InvalidValue) as caught:
        write_file("--snapshot", str(link), b"\x80\x04.")
    assert str(caught.value) == (
        f"--snapshot: '{link}' will not do; expected a file that can be written (No space left on device)."
    )
