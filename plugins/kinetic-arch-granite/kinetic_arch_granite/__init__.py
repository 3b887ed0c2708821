"""Granite 4.0 hybrid language models for Kinetic: `architecture` is the forward pass, `plugin` registers it."""

__version__ = "0.1.0"
