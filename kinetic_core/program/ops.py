"""The operations of a program, as data. kinetic_core/reference says in NumPy what each computes.

Naming: `out` and `outs` (of `Route`: `experts` and `weights`) are what an operation makes; every other `Value` field is
read. Widths are checked when the builder records an operation, so a backend may rely on them.
"""

from __future__ import annotations

from typing import Literal

import attrs

from kinetic_core.program.values import KVLayer, RecurrentState, Value, Weight


@attrs.frozen
class Embedding:
    """out[r] = weight[token_ids[r]] * scale."""

    out: Value
    weight: Weight
    scale: float = 1.0


@attrs.frozen
class GatherOutputs:
    """out[i] = x[row of the i-th wanted output]: rows -> outputs."""

    out: Value
    x: Value


@attrs.frozen
class RmsNorm:
    """Over each run of `group_width` columns: out = x / sqrt(mean(x^2) + eps) * weight.

    weight: [group_width], the same for every group, or [width].
    """

    out: Value
    x: Value
    weight: Weight
    eps: float
    group_width: int


@attrs.frozen
class L2Norm:
    """Over each run of `group_width` columns: out = x / sqrt(sum(x^2) + eps) * scale."""

    out: Value
    x: Value
    eps: float
    group_width: int
    scale: float = 1.0


@attrs.frozen
class Linear:
    """outs[i] = x @ weights[i].T (+ biases[i]). Weights that share an input are recorded together.

    weights[i]: [outs[i].width, x.width]; biases[i]: [outs[i].width] or None.
    """

    outs: tuple[Value, ...]
    x: Value
    weights: tuple[Weight, ...]
    biases: tuple[Weight | None, ...]


@attrs.frozen
class Add:
    """out = a + b * factor."""

    out: Value
    a: Value
    b: Value
    factor: float = 1.0


@attrs.frozen
class Multiply:
    """out = a * b."""

    out: Value
    a: Value
    b: Value


@attrs.frozen
class Scale:
    """out = x * factor."""

    out: Value
    x: Value
    factor: float


@attrs.frozen
class Slice:
    """out = x[:, start : start + out.width]."""

    out: Value
    x: Value
    start: int


@attrs.frozen
class SliceHeads:
    """out = columns start … start + n - 1 of each of `heads` equal parts of x, side by side; n = out.width / heads."""

    out: Value
    x: Value
    heads: int
    start: int


@attrs.frozen
class Gate:
    """out = activation(gate) * x; silu(g) = g * sigmoid(g).

    gate.width = x.width, or one gate per run of x.width / gate.width columns.
    """

    out: Value
    gate: Value
    x: Value
    activation: Literal["silu", "sigmoid"]


@attrs.frozen
class Rope:
    """Rotary position embedding of each head's first `rotary_dim` columns.

    Pair i of rotary_dim / 2 turns by position * base^(-2 i / rotary_dim) / factors[i]. interleaved: pair i is columns
    (2i, 2i + 1); else (i, i + rotary_dim / 2).
    """

    out: Value
    x: Value
    head_dim: int
    rotary_dim: int
    base: float
    interleaved: bool
    factors: Weight | None = None


@attrs.frozen
class Attention:
    """Causal attention over the row's path; the step first writes k and v, rounded to the cache type.

    q: [heads * head_dim]; k, v: [kv_heads * head_dim]; query head h reads key head h // (heads // kv_heads);
    scores are multiplied by `scale`. A row sees `layer.window` positions, itself included, or all.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    layer: KVLayer
    heads: int
    scale: float


@attrs.frozen
class ShortConv:
    """Causal depthwise convolution: out[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - (K - 1) + j, c]).

    weight: [width, K]; the last tap meets the row itself; rows before the start are zero; the sum runs from j = 0.
    state: [K - 1, width], the last inputs, oldest first.
    """

    out: Value
    x: Value
    weight: Weight
    bias: Weight | None
    state: RecurrentState
    activation: Literal["none", "silu"]


@attrs.frozen
class DeltaRule:
    """Gated delta rule, one state S [key_dim, value_dim] per value head.

    Per row: S = exp(decay) S; delta = beta (v - S^T k); S = S + k delta^T; out = S^T q. Value head h reads key head
    h % key_heads. q, k: [key_heads * key_dim]; v, out: [value_heads * value_dim]; decay, beta: [value_heads].
    Source: Gated Delta Networks, Yang et al. 2024, arXiv 2412.06464.
    """

    out: Value
    q: Value
    k: Value
    v: Value
    decay: Value
    beta: Value
    state: RecurrentState
    key_heads: int
    value_heads: int


@attrs.frozen
class DecayGate:
    """out = a * softplus(x + dt_bias): the logarithm of a decay, one per head, negative. a, dt_bias: [width]."""

    out: Value
    x: Value
    a: Weight
    dt_bias: Weight


@attrs.frozen
class Sigmoid:
    """out = sigmoid(x)."""

    out: Value
    x: Value


@attrs.frozen
class Softplus:
    """out = ln(1 + e^(x + bias)). bias: [width] or None."""

    out: Value
    x: Value
    bias: Weight | None = None


@attrs.frozen
class Mamba2Scan:
    """The recurrence of Mamba-2, one state S [state_dim, head_dim] per head (S[n, p] of the paper's S^T).

    Per row: S = exp(dt a) S + b (dt x)^T; out = S^T c + d x. Head h reads group h // (heads // groups) of b and c.
    x, out: [heads * head_dim]; b, c: [groups * state_dim]; dt: [heads], after softplus; a (negative), d: [heads].
    Source: Dao and Gu 2024, arXiv 2405.21060.
    """

    out: Value
    x: Value
    b: Value
    c: Value
    dt: Value
    a: Weight
    d: Weight
    state: RecurrentState
    heads: int
    groups: int


@attrs.frozen
class Route:
    """Choose each row's experts and their weights, in ascending expert id.

    s = softmax or sigmoid of the logits. Chosen are the `experts.width` experts with the highest s + bias; equal ones
    by the lower id. weights = s of the chosen; if `normalized`, divided by (their sum + eps).

    logits: [n_experts]; experts: ids as floats, weights: [n_used]; bias: [n_experts] or None.
    """

    experts: Value
    weights: Value
    logits: Value
    scoring: Literal["softmax", "sigmoid"]
    bias: Weight | None
    normalized: bool
    eps: float


@attrs.frozen
class Experts:
    """out = sum over the row's experts e, in ascending id, of weight_e * (down_e (silu(gate_e x) * up_e x)).

    experts, weights: [n_used], as `Route` makes them; gate, up: [n_experts, d_expert, d_model];
    down: [n_experts, d_model, d_expert]. Source: Shazeer et al. 2017, arXiv 1701.06538.
    """

    out: Value
    x: Value
    experts: Value
    weights: Value
    gate: Weight
    up: Weight
    down: Weight


@attrs.frozen
class HiddenInput:
    """out = the hidden states that the caller of a prediction step gives with its rows: f32[rows, d_model]."""

    out: Value


@attrs.frozen
class Concatenate:
    """out = the columns of a, then those of b."""

    out: Value
    a: Value
    b: Value


Op = (
    Embedding
    | GatherOutputs
    | RmsNorm
    | L2Norm
    | Linear
    | Add
    | Multiply
    | Scale
    | Slice
    | SliceHeads
    | Gate
    | Rope
    | Attention
    | ShortConv
    | DeltaRule
    | DecayGate
    | Sigmoid
    | Softplus
    | Mamba2Scan
    | Route
    | Experts
    | HiddenInput
    | Concatenate
)


def weights_of(op: Op) -> tuple[Weight, ...]:
    """Every weight that an operation reads."""
    found: list[Weight] = []
    for field in attrs.fields(type(op)):
        value = getattr(op, field.name)
        found += [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Weight)]
    return tuple(found)


def values_read(op: Op) -> list[Value]:
    """The values that an operation reads."""
    made = ("experts", "weights") if isinstance(op, Route) else ("out", "outs")
    fields = [field.name for field in attrs.fields(type(op)) if field.name not in made]
    return [value for name in fields if isinstance(value := getattr(op, name), Value)]
