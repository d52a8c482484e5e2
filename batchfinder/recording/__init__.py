"""Runs a training step on a pretend GPU and writes down each allocation."""
