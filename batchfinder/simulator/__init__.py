"""HOW MUCH memory a recorded step takes: its records, their scaling, the caching allocator, the replay."""
