"""Config files that other tools train from, read for what matters to memory, and sizes written back into them."""

from batchfinder.configs.files import read_mapping, with_number
from batchfinder.configs.formats import read_config
from batchfinder.configs.record import Setting, Size, TrainingConfig

__all__ = ["Setting", "Size", "TrainingConfig", "read_config", "read_mapping", "with_number"]
