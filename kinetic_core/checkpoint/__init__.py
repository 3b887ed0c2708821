"""What a plugin says about its family's Hugging Face checkpoints, so that `kinetic_core.convert` can read them.

    CHECKPOINT = CheckpointFormat(("ToyForCausalLM",), metadata, rules)

    class Toy(Architecture):
        checkpoint = CHECKPOINT

`metadata` turns config.json into the file's keys, `rules` lists the file's tensors and what each is made from. The
functions here are what families have in common: names, rope settings, orders of rows.
"""

from kinetic_core.checkpoint.config import CheckpointConfig
from kinetic_core.checkpoint.format import (
    ATTENTION,
    SWIGLU,
    CheckpointFormat,
    TensorRule,
    block_rules,
    model_rules,
)
from kinetic_core.checkpoint.settings import (
    common_metadata,
    expert_metadata,
    head_dim,
    layer_count,
    layer_types,
    mamba2_metadata,
    rope_base,
    rope_settings,
    rope_type,
)
from kinetic_core.checkpoint.transforms import (
    adjacent_pairs,
    as_column,
    chain,
    first_half,
    in_groups,
    negative_exp,
    plus_one,
    scaled,
    second_half,
    unchanged,
    without_middle_axis,
)

__all__ = [
    "ATTENTION",
    "SWIGLU",
    "CheckpointConfig",
    "CheckpointFormat",
    "TensorRule",
    "adjacent_pairs",
    "as_column",
    "block_rules",
    "chain",
    "common_metadata",
    "expert_metadata",
    "first_half",
    "head_dim",
    "in_groups",
    "layer_count",
    "layer_types",
    "mamba2_metadata",
    "model_rules",
    "negative_exp",
    "plus_one",
    "rope_base",
    "rope_settings",
    "rope_type",
    "scaled",
    "second_half",
    "unchanged",
    "without_middle_axis",
]
