"""Runs a training step on a fake GPU and writes down each allocation."""
