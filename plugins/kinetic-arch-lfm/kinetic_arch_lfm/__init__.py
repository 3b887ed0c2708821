"""LFM2, LFM2-MoE and LFM3 for Kinetic: `lfm2` and `lfm3` are the forward passes, `blocks` what they share."""

__version__ = "0.1.0"
