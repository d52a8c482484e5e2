"""The parts of `benchmarks/cuda_check.py`, one file each.

The near end (`prediction`, `maxima`, `trace_check`, `gpu_tests`, `report` and what they need) imports no torch. The far
end (`worker`, `meter`, `stand_in`, `step_measure`, `callback_check`) runs in child processes, which alone use the card.
"""
