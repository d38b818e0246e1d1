"""Backbones: the built-in MLP and adapters for Flax modules."""
