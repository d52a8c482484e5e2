"""What a sweep costs with more cells, a deeper model, and a larger card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchfinder.devices import Device
from batchfinder.recording.simulation import Simulation, StepConfig, search_simulated
from batchfinder.results import Shape
from batchfinder.units import GIB
from speed_parts.clock import Clock
from speed_parts.recorded import spec_of


def more_cells(model: str, counts: Sequence[int], device: Device) -> list[dict[str, Any]]:
    """Lengths from 32 on, 16 apart.

    Args:
        model: a name in the zoo, or a config.
        counts: how many lengths, each time.
        device: the card.
    """
    return [{"cells": count, **_swept(model, range(32, 32 + 16 * count, 16), device)} for count in counts]


def deeper(layers: Sequence[int], device: Device, folder: Path) -> list[dict[str, Any]]:
    """BERTs of 256 dimensions with more and more layers, one cell each.

    Args:
        layers: how many, each time.
        device: the card.
        folder: for their configs.
    """
    found = []
    config = {"model_type": "bert", "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    for count in layers:
        path = folder / f"{count}-layers" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps({**config, "num_hidden_layers": count}))
        found.append({"layers": count, **_swept(str(path), (128,), device)})
    return found


def larger(model: str, budgets_gib: Sequence[int], device: Device) -> list[dict[str, Any]]:
    """Cards with more memory, so that there are more sizes to search.

    Args:
        model: a name in the zoo, or a config.
        budgets_gib: how much, each time.
        device: the card, with its own memory.
    """
    found = []
    for budget in budgets_gib:
        card = replace(device, total_bytes=budget * GIB, usable_bytes=budget * GIB)
        found.append({"budget_gib": budget, **_swept(model, (128,), card)})
    return found


def _swept(model: str, seq_lens: Sequence[int], device: Device) -> dict[str, Any]:
    """One sweep with nothing known, the recording process's start included."""
    clock = Clock()
    with Simulation(spec_of(model), StepConfig()) as simulation:
        probe = simulation.probe(device, seq_lens)
        outcomes = [search_simulated(probe, Shape(seq_len)) for seq_len in seq_lens]
    return {
        "recordings": probe.traces.recordings,
        "sizes_tried": sum(len(outcome.trials) for outcome in outcomes),
        "largest": max(outcome.max_batch_size for outcome in outcomes),
        **clock.read(),
    }
