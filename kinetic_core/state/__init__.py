"""What running sequences hold: reference-counted KV blocks, recurrent-state slots, and the state of one sequence.

This folder counts and hands out; the bytes themselves lie in the backend's `Executable`.
"""

from kinetic_core.state.pools import BlockPool, SlotPool
from kinetic_core.state.sequence import SequenceState

__all__ = ["BlockPool", "SequenceState", "SlotPool"]
