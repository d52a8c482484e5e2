"""Agreement between the ranks of a distributed run, and steps that run on one rank alone."""
