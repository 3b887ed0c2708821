"""Sources of guesses for Kinetic: `context`, `requests` and `mtp`; `plugin` registers them."""

__version__ = "0.1.0"
