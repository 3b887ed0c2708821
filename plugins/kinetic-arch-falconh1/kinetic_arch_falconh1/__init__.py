"""Falcon-H1 language models for Kinetic: `architecture` is the forward pass, `plugin` registers it."""

__version__ = "0.1.0"
