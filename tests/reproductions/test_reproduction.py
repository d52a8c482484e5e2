"""One cell as JSON values."""

from __future__ import annotations

from batchfinder.reproductions.base import Reproduction, row


def test_ratio() -> None:
    """Ours by published, to four places; none where one is missing or the published figure is 0."""
    assert row("a cell", 3, 1) == {"cell": "a cell", "published": 3, "ours": 1, "ratio": 0.3333}
    assert row("a cell", 0, 5)["ratio"] is None
    assert row("a cell", None, 5)["ratio"] is None
    assert row("a cell", 5, None)["ratio"] is None
    assert row("a cell", 5, 0)["ratio"] == 0


def test_more() -> None:
    """What else there is to say of a cell stands beside it, and a reproduction keeps the rows' order."""
    rows = (row("one", 1, 1, unit="MiB"), row("two", 2, 2))
    assert Reproduction("name", rows, (), ("note",)).to_json() == {
        "name": "name",
        "rows": [
            {"cell": "one", "published": 1, "ours": 1, "ratio": 1.0, "unit": "MiB"},
            {"cell": "two", "published": 2, "ours": 2, "ratio": 1.0},
        ],
        "notes": ["note"],
    }
