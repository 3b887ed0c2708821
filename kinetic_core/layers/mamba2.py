"""The Mamba-2 mixer.

    z, u, dt = Win y;  x, B, C = silu(conv(u));  dt = softplus(dt + bias)
    S = e^(dt a) S + (dt x) B^T;  o = S C + d x                                  per head
    Wout rms_per_group(o * silu(z))

x has the columns of all heads, B and C those of all groups; consecutive heads share a group's B and C, and the norm is
over the columns of a group's heads. Source: Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinetic_core.gguf import Metadata

if TYPE_CHECKING:
    from kinetic_core.layers.named import LayerBuilder
    from kinetic_core.program import Value


@dataclass(frozen=True)
class Mamba2:
    """The mixer of one size.

    d_inner: columns of x, of all heads. d_state: of B and C, per group. heads, groups: their numbers. taps: of the
    convolution, the row's own included.
    """

    d_inner: int
    d_state: int
    heads: int
    groups: int
    taps: int

    @classmethod
    def read(cls, meta: Metadata) -> Mamba2:
        """The sizes that the keys under ``ssm.`` say; MetadataError where they do not fit each other."""
        sizes = cls(
            d_inner=meta.get_int("ssm.inner_size", minimum=1),
            d_state=meta.get_int("ssm.state_size", minimum=1),
            heads=meta.get_int("ssm.time_step_rank", minimum=1),
            groups=meta.get_int("ssm.group_count", 1, minimum=1),
            taps=meta.get_int("ssm.conv_kernel", minimum=2),
        )
        if sizes.d_inner % sizes.heads:
            raise meta.does_not_fit("ssm.inner_size", sizes.d_inner, f"a multiple of {sizes.heads}, the heads")
        if sizes.heads % sizes.groups:
            raise meta.does_not_fit("ssm.group_count", sizes.groups, f"a divisor of {sizes.heads}, the heads")
        return sizes

    @property
    def channels(self) -> int:
        """Columns that the convolution mixes: x, B and C."""
        return self.d_inner + 2 * self.groups * self.d_state

    def record(self, block: LayerBuilder, y: Value) -> Value:
        """f32[rows, y.width]. The convolution's bias and the norm are left out where the file has none."""
        b, d, bc, heads = block.b, self.d_inner, self.groups * self.d_state, (self.heads,)
        z, u, dt = b.split(block.linear("ssm_in", y, d + self.channels + self.heads), (d, self.channels, self.heads))
        conv = block.weight("ssm_conv1d.weight", (self.channels, self.taps))
        u = b.short_conv(u, conv, block.optional_weight("ssm_conv1d.bias", (self.channels,)), "silu")
        x, b_, c = b.split(u, (d, bc, bc))
        dt = b.softplus(dt, block.weight("ssm_dt.bias", heads))
        a, skip = block.weight("ssm_a", heads), block.weight("ssm_d", heads)
        o = b.gate(z, b.mamba2_scan(x, b_, c, dt, a, skip, heads=self.heads, groups=self.groups), "silu")
        norm = block.optional_weight("ssm_norm.weight", (self.groups, d // self.groups))
        if norm is not None:
            o = b.rms_norm(o, norm, block.eps, d // self.groups)
        return block.linear("ssm_out", o, y.width)

    def matrices(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """The linear layers by name, for a miniature: name -> shape."""
        return {"ssm_in": (self.d_inner + self.channels + self.heads, d_model), "ssm_out": (d_model, self.d_inner)}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The other tensors by name with ending, those that files may lack too, for a miniature: name -> shape."""
        heads = (self.heads,)
        return {
            "ssm_a": heads,
            "ssm_d": heads,
            "ssm_dt.bias": heads,
            "ssm_conv1d.weight": (self.channels, self.taps),
            "ssm_conv1d.bias": (self.channels,),
            "ssm_norm.weight": (self.groups, self.d_inner // self.groups),
        }
