"""Sweeps on a Ray cluster: `sweep` from Python, and what `batchfinder sweep --engine ray` does."""

from batchfinder.fleet.ray_sweep import run_on_ray, sweep

__all__ = ["run_on_ray", "sweep"]
