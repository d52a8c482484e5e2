"""What is known already: keys, self-explaining records, and a store of them at any fsspec URL."""

from __future__ import annotations

from batchfinder.cache.exchange import read_export, write_export
from batchfinder.cache.key import CacheKey
from batchfinder.cache.record import DamagedRecord, Record
from batchfinder.cache.store import DamagedRecordWarning, Slot, Store, default_cache_url

__all__ = [
    "CacheKey",
    "DamagedRecord",
    "DamagedRecordWarning",
    "Record",
    "Slot",
    "Store",
    "default_cache_url",
    "read_export",
    "write_export",
]
