"""The table of options that train where those asked for do not."""

from __future__ import annotations

from batchfinder.accumulation import AccumulationPlan
from batchfinder.devices import Card, device_for, find_gpu
from batchfinder.recording.what_fits import Fit, WhatFits
from batchfinder.report.what_fits import what_fits_table
from batchfinder.training.spec import StepOptions
from batchfinder.units import GIB

T4 = Card(device_for(find_gpu("t4")), "T4")


def test_a_plan_that_misses_the_target_has_the_exact_one_beside_it() -> None:
    """Unless its micro-batch is too small to be taken."""
    fit = Fit("--loss chunked", StepOptions(loss="chunked"), AccumulationPlan(256, 15, 17), 9 * GIB, 100, False)
    found = WhatFits(StepOptions(), 20 * GIB, 100, (fit,), 2, 0)
    plans = what_fits_table(found, T4, "").columns["micro-batch x accumulation"]
    assert plans == ["1 does not fit", "15 x 17 = 255 (exactly 256: 8 x 32)"]
    least = WhatFits(StepOptions(), 20 * GIB, 100, (fit,), 2, 0, min_micro_batch=9)
    plans = what_fits_table(least, T4, "").columns["micro-batch x accumulation"]
    assert plans == ["9 do not fit", "15 x 17 = 255"]


def test_nothing_trains_micro_batches_as_large() -> None:
    """It is said of how many samples."""
    for least, samples in ((1, "one sample"), (4, "a micro-batch of 4")):
        table = what_fits_table(WhatFits(StepOptions(), GIB, 1, (), 2, 0, min_micro_batch=least), T4, "")
        assert table.notes[0] == f"nothing that was tried trains {samples} on this GPU"
