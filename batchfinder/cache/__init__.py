"""Results kept between runs: keys, self-explaining records, and a store of them at any fsspec URL."""

from __future__ import annotations

from batchfinder.cache.key import CacheKey
from batchfinder.cache.record import DamagedRecord, Record, read_export, write_export
from batchfinder.cache.store import CacheEntry, DamagedRecordWarning, Store, default_cache_url

__all__ = [
    "CacheEntry",
    "CacheKey",
    "DamagedRecord",
    "DamagedRecordWarning",
    "Record",
    "Store",
    "default_cache_url",
    "read_export",
    "write_export",
]
