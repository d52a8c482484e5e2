"""Versions of libraries, found without reading all that is installed where possible."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

from batchfinder.models import fingerprint


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each time that all distributions are read."""
    times: list[str] = []

    def reading() -> dict[str, list[str]]:
        times.append("read")
        return importlib.metadata.packages_distributions()

    monkeypatch.setattr(fingerprint, "packages_distributions", reading)
    fingerprint._distributions.cache_clear()
    return times


def test_a_distribution_of_the_modules_name_is_found_by_it(read: list[str]) -> None:
    """As most are; nothing else is read."""
    assert fingerprint.versions(["numpy.random", "rich"]) == {
        name: importlib.metadata.version(name) for name in ("numpy", "rich")
    }
    assert read == []


def test_another_name_takes_reading_all(read: list[str]) -> None:
    """Once a process: yaml is PyYAML's, and _pytest is pytest's."""
    for _ in range(2):
        assert fingerprint.versions(["yaml.nodes", "_pytest"]) == {
            name: importlib.metadata.version(name) for name in ("PyYAML", "pytest")
        }
    assert read == ["read"]


def test_the_users_own_and_what_is_in_every_key_are_left_out(read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts stand for the user's modules; nothing is read for them."""
    mine = types.ModuleType("mine_of_the_test")
    mine.__file__ = __file__
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    names = ["mine_of_the_test.part", "mine_of_the_test", "__main__", "torch.nn", "lightning_fabric", "os.path", ""]
    assert fingerprint.versions(names) == {}
    assert read == []
