"""The parts of `peers.py`: the work, the judge, the cases, one file per peer, and the report."""
