"""What families of models share, for architectures to be put together from; using it is a choice, never a duty.

`decoder` has the base class of decoders, `keys` reads metadata keys that mean the same everywhere and refuses what
their values rule out, `named` records layers by the names of their tensors, `mamba2` is the Mamba-2 mixer,
`miniature` describes tiny variants. docs/plugins.md shows an architecture made of them.
"""

from kinetic_core.layers.decoder import DecoderArchitecture
from kinetic_core.layers.keys import (
    read_head_dim,
    read_kv_heads,
    read_rotary_dim,
    refuse_rope_scaling,
    require_values,
)
from kinetic_core.layers.mamba2 import Mamba2
from kinetic_core.layers.miniature import (
    attention_matrices,
    expert_matrices,
    feed_forward_matrices,
    layer_tensors,
    tiny_decoder,
)
from kinetic_core.layers.named import LayerBuilder

__all__ = [
    "DecoderArchitecture",
    "LayerBuilder",
    "Mamba2",
    "attention_matrices",
    "expert_matrices",
    "feed_forward_matrices",
    "layer_tensors",
    "read_head_dim",
    "read_kv_heads",
    "read_rotary_dim",
    "refuse_rope_scaling",
    "require_values",
    "tiny_decoder",
]
