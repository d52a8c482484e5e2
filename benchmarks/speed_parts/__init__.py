"""The parts of `sweep_speed.py`."""
