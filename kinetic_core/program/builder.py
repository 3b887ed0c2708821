"""Records a program; every shape is checked at the moment an operation is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kinetic_core.errors import TensorError, describe
from kinetic_core.program import ops
from kinetic_core.program.program import Prediction, Program
from kinetic_core.program.values import Axis, KVLayer, RecurrentState, Value, Weight


class ProgramBuilder:
    """Passed to an architecture's `build`; each method records one operation and returns its value.

    shapes: tensor name -> shape (outermost first) of every tensor in the file; `weight` checks against it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._ops: list[ops.Op] = []
        self._n_values = 0
        self._weights: dict[str, Weight] = {}
        self._kv_layers: list[KVLayer] = []
        self._states: list[RecurrentState] = []
        self._trunk_ops: tuple[ops.Op, ...] | None = None

    # weights

    def has(self, name: str) -> bool:
        """Does the file have a tensor of this name?"""
        return name in self._shapes

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """The tensor `name`, which must have `shape` (axes of extent 1 may be absent or present).

        Raises TensorError, naming the tensor, what was found and what was expected.
        """
        found = self._shapes.get(name)
        if found is None:
            raise TensorError(
                describe(
                    f"the tensor {name!r} is missing",
                    expected=f"shape {shape}",
                    hint="the file is incomplete or of a variant that is not supported",
                )
            )
        if _squeezed(found) != _squeezed(shape):
            raise TensorError(describe(f"the tensor {name!r} has another shape", got=found, expected=shape))
        return self._weights.setdefault(name, Weight(name, shape))

    def optional_weight(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """`weight`, or None where the file has no such tensor."""
        return self.weight(name, shape) if self.has(name) else None

    # recording

    def _value(self, width: int, axis: Axis = Axis.ROWS) -> Value:
        value = Value(self._n_values, width, axis)
        self._n_values += 1
        return value

    def _record(self, op: ops.Op) -> None:
        self._ops.append(op)

    def embedding(self, weight: Weight, scale: float = 1.0) -> Value:
        """f32[rows, d_model]: the token embeddings times `scale`. weight: [vocab, d_model]."""
        _check("an embedding's weight has 2 axes", len(weight.shape), 2)
        out = self._value(weight.shape[1])
        self._record(ops.Embedding(out, weight, scale))
        return out

    def gather_outputs(self, x: Value) -> Value:
        """The rows whose logits are wanted: f32[outputs, width]."""
        _check("only rows can be gathered", x.axis, Axis.ROWS)
        out = self._value(x.width, Axis.OUTPUTS)
        self._record(ops.GatherOutputs(out, x))
        return out

    def rms_norm(self, x: Value, weight: Weight, eps: float, group_width: int | None = None) -> Value:
        """Root-mean-square norm over the whole width, or over each run of `group_width` columns (per head)."""
        group = group_width or x.width
        _check_divides("the norm's group", group, x.width)
        size = _size(weight)
        if size not in (group, x.width):
            raise TensorError(
                describe(
                    f"the norm weight {weight.name!r} does not fit",
                    got=size,
                    expected=f"{group} or {x.width}",
                )
            )
        out = self._value(x.width, x.axis)
        self._record(ops.RmsNorm(out, x, weight, eps, group))
        return out

    def l2_norm(self, x: Value, eps: float, group_width: int, scale: float = 1.0) -> Value:
        """Each run of `group_width` columns divided by its length, times `scale`."""
        _check_divides("the norm's group", group_width, x.width)
        out = self._value(x.width, x.axis)
        self._record(ops.L2Norm(out, x, eps, group_width, scale))
        return out

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        """x @ weight.T (+ bias): f32[rows, outputs of weight]."""
        return self.linears(x, [weight], [bias])[0]

    def linears(
        self, x: Value, weights: Sequence[Weight], biases: Sequence[Weight | None] | None = None
    ) -> tuple[Value, ...]:
        """Several linear layers of one input, recorded together so that a backend reads the input once."""
        biases = tuple(biases) if biases is not None else (None,) * len(weights)
        for weight, bias in zip(weights, biases, strict=True):
            _check(f"axes of {weight.name!r}", len(weight.shape), 2)
            _check(f"inputs of {weight.name!r}", weight.shape[1], x.width)
            if bias is not None:
                _check(f"width of {bias.name!r}", _size(bias), weight.shape[0])
        outs = tuple(self._value(weight.shape[0], x.axis) for weight in weights)
        self._record(ops.Linear(outs, x, tuple(weights), biases))
        return outs

    def add(self, a: Value, b: Value, factor: float = 1.0) -> Value:
        """a + b * factor."""
        self._check_alike(a, b)
        out = self._value(a.width, a.axis)
        self._record(ops.Add(out, a, b, factor))
        return out

    def multiply(self, a: Value, b: Value) -> Value:
        """a * b, column by column."""
        self._check_alike(a, b)
        out = self._value(a.width, a.axis)
        self._record(ops.Multiply(out, a, b))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor."""
        out = self._value(x.width, x.axis)
        self._record(ops.Scale(out, x, factor))
        return out

    def slice(self, x: Value, start: int, width: int) -> Value:
        """Columns start … start + width - 1."""
        if start < 0 or width < 1 or start + width > x.width:
            raise ValueError(
                describe("a slice runs past the value", got=f"{start}:{start + width}", expected=f"0:{x.width}")
            )
        out = self._value(width, x.axis)
        self._record(ops.Slice(out, x, start))
        return out

    def split(self, x: Value, widths: Sequence[int]) -> tuple[Value, ...]:
        """Consecutive slices of these widths, which add up to x's."""
        _check("the widths of a split add up", sum(widths), x.width)
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return tuple(self.slice(x, start, width) for start, width in zip(starts, widths, strict=True))

    def gate(self, gate: Value, x: Value, activation: Literal["silu", "sigmoid"]) -> Value:
        """activation(gate) * x; one gate per column, or per run of x.width / gate.width columns."""
        _check_divides("the gate's width", gate.width, x.width)
        out = self._value(x.width, x.axis)
        self._record(ops.Gate(out, gate, x, activation))
        return out

    def sigmoid(self, x: Value) -> Value:
        """sigmoid(x)."""
        out = self._value(x.width, x.axis)
        self._record(ops.Sigmoid(out, x))
        return out

    def decay_gate(self, x: Value, a: Weight, dt_bias: Weight) -> Value:
        """a * softplus(x + dt_bias)."""
        _check(f"width of {a.name!r}", _size(a), x.width)
        _check(f"width of {dt_bias.name!r}", _size(dt_bias), x.width)
        out = self._value(x.width, x.axis)
        self._record(ops.DecayGate(out, x, a, dt_bias))
        return out

    def rope(
        self,
        x: Value,
        *,
        head_dim: int,
        rotary_dim: int,
        base: float,
        interleaved: bool,
        factors: Weight | None = None,
    ) -> Value:
        """Rotary position embedding, see `ops.Rope`."""
        _check_divides("the head size", head_dim, x.width)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                describe("bad rope dimensions", got=rotary_dim, expected=f"an even number, at most {head_dim}")
            )
        if factors is not None:
            _check(f"width of {factors.name!r}", _size(factors), rotary_dim // 2)
        out = self._value(x.width, x.axis)
        self._record(ops.Rope(out, x, head_dim, rotary_dim, base, interleaved, factors))
        return out

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        window: int | None = None,
    ) -> Value:
        """Causal grouped-query attention with its own keys and values; scale defaults to 1 / sqrt(head_dim).

        In a prediction block positions count from 1: position 0 has no hidden state before it.
        """
        _check_divides("the number of key heads", kv_heads, heads)
        _check("width of q", q.width, heads * head_dim)
        _check("width of k", k.width, kv_heads * head_dim)
        _check("width of v", v.width, kv_heads * head_dim)
        layer = KVLayer(
            len(self._kv_layers), kv_heads, head_dim, window, first_position=0 if self._trunk_ops is None else 1
        )
        self._kv_layers.append(layer)
        out = self._value(q.width)
        self._record(ops.Attention(out, q, k, v, layer, heads, head_dim**-0.5 if scale is None else scale))
        return out

    def short_conv(
        self,
        x: Value,
        weight: Weight,
        bias: Weight | None = None,
        activation: Literal["none", "silu"] = "none",
    ) -> Value:
        """Causal depthwise convolution with its own state. weight: [width, K]."""
        _check(f"channels of {weight.name!r}", weight.shape[0], x.width)
        if bias is not None:
            _check(f"width of {bias.name!r}", _size(bias), x.width)
        state = self._state(weight.name, (weight.shape[1] - 1, x.width))
        out = self._value(x.width)
        self._record(ops.ShortConv(out, x, weight, bias, state, activation))
        return out

    def delta_rule(
        self, q: Value, k: Value, v: Value, decay: Value, beta: Value, *, key_heads: int, value_heads: int
    ) -> Value:
        """Gated delta rule with its own state, see `ops.DeltaRule`."""
        _check("width of k", k.width, q.width)
        _check_divides("the number of key heads", key_heads, q.width)
        _check_divides("the number of value heads", value_heads, v.width)
        _check_divides("key heads of the value heads", key_heads, value_heads)
        _check("width of decay", decay.width, value_heads)
        _check("width of beta", beta.width, value_heads)
        state = self._state("delta_rule", (value_heads, q.width // key_heads, v.width // value_heads))
        out = self._value(v.width)
        self._record(ops.DeltaRule(out, q, k, v, decay, beta, state, key_heads, value_heads))
        return out

    def mamba2_scan(
        self, x: Value, b: Value, c: Value, dt: Value, a: Weight, d: Weight, *, heads: int, groups: int
    ) -> Value:
        """The recurrence of Mamba-2 with its own state, see `ops.Mamba2Scan`."""
        _check_divides("the number of heads", heads, x.width)
        _check_divides("the number of groups", groups, b.width)
        _check_divides("the groups of the heads", groups, heads)
        _check("width of c", c.width, b.width)
        _check("width of dt", dt.width, heads)
        for weight in (a, d):
            _check(f"width of {weight.name!r}", _size(weight), heads)
        state = self._state("mamba2_scan", (heads, b.width // groups, x.width // heads))
        out = self._value(x.width)
        self._record(ops.Mamba2Scan(out, x, b, c, dt, a, d, state, heads, groups))
        return out

    def softplus(self, x: Value, bias: Weight | None = None) -> Value:
        """ln(1 + e^(x + bias))."""
        if bias is not None:
            _check(f"width of {bias.name!r}", _size(bias), x.width)
        out = self._value(x.width, x.axis)
        self._record(ops.Softplus(out, x, bias))
        return out

    def route(
        self,
        logits: Value,
        n_used: int,
        scoring: Literal["softmax", "sigmoid"],
        *,
        bias: Weight | None = None,
        normalized: bool = True,
        eps: float = 0.0,
    ) -> tuple[Value, Value]:
        """(experts, weights), each f32[rows, n_used], see `ops.Route`."""
        if not 1 <= n_used <= logits.width:
            raise ValueError(describe("bad number of experts per row", got=n_used, expected=f"1 to {logits.width}"))
        if bias is not None:
            _check(f"width of {bias.name!r}", _size(bias), logits.width)
        experts, weights = self._value(n_used, logits.axis), self._value(n_used, logits.axis)
        self._record(ops.Route(experts, weights, logits, scoring, bias, normalized, eps))
        return experts, weights

    def experts(self, x: Value, routed: tuple[Value, Value], gate: Weight, up: Weight, down: Weight) -> Value:
        """The weighted sum of the routed experts, see `ops.Experts`; routed: what `route` gave."""
        experts, weights = routed
        n_experts, d_expert = gate.shape[0], gate.shape[1]
        for weight, shape in ((gate, (d_expert, x.width)), (up, (d_expert, x.width)), (down, (x.width, d_expert))):
            _check(f"shape of {weight.name!r}", weight.shape, (n_experts, *shape))
        _check("width of the weights", weights.width, experts.width)
        _check("axis of the experts", experts.axis, x.axis)
        out = self._value(x.width, x.axis)
        self._record(ops.Experts(out, x, experts, weights, gate, up, down))
        return out

    def concatenate(self, a: Value, b: Value) -> Value:
        """The columns of a, then those of b."""
        _check("axis of the second operand", b.axis, a.axis)
        out = self._value(a.width + b.width, a.axis)
        self._record(ops.Concatenate(out, a, b))
        return out

    # the prediction block

    def begin_prediction(self, d_model: int) -> Value:
        """What is recorded from here on is the prediction block; its input: f32[rows, d_model], hidden states.

        Row r of the input is the trunk's hidden state (after the last norm) of the position before the row's token.
        """
        _check("prediction blocks begun before", self._trunk_ops is not None, False)
        self._trunk_ops, self._ops = tuple(self._ops), []
        hidden = self._value(d_model)
        self._record(ops.HiddenInput(hidden))
        return hidden

    def _state(self, name: str, shape: tuple[int, ...]) -> RecurrentState:
        if self._trunk_ops is not None:
            raise ValueError(describe("a prediction block cannot have recurrent states", got=name))
        state = RecurrentState(len(self._states), name, shape)
        self._states.append(state)
        return state

    def _check_alike(self, a: Value, b: Value) -> None:
        _check("width of the second operand", b.width, a.width)
        _check("axis of the second operand", b.axis, a.axis)

    def finish(
        self,
        hidden: Value,
        logits: Value,
        ignored: Sequence[str] = (),
        prediction: tuple[Value, Value] | None = None,
    ) -> Program:
        """The program. prediction: hidden and logits of the prediction block, if one was recorded.

        Raises TensorError when the file has tensors that no operation reads.
        """
        if prediction is not None:
            _check("the prediction block's hidden width", prediction[0].width, hidden.width)
            _check("the prediction block's vocabulary", prediction[1].width, logits.width)
        unread = sorted(set(self._shapes) - set(self._weights) - set(ignored))
        if unread:
            shown = ", ".join(unread[:5]) + (f" and {len(unread) - 5} more" if len(unread) > 5 else "")
            raise TensorError(
                describe(
                    "the file has tensors that this architecture does not know",
                    got=shown,
                    hint="it is of a variant that is not supported",
                )
            )
        trunk = tuple(self._ops) if self._trunk_ops is None else self._trunk_ops
        return Program(
            ops=trunk,
            n_values=self._n_values,
            weights=tuple(self._weights.values()),
            kv_layers=tuple(self._kv_layers),
            states=tuple(self._states),
            hidden=hidden,
            logits=logits,
            prediction=None if prediction is None else Prediction(tuple(self._ops), *prediction),
        )


def _size(weight: Weight) -> int:
    size = 1
    for extent in weight.shape:
        size *= extent
    return size


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _check(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ValueError(describe(what, got=got, expected=expected))


def _check_divides(what: str, part: int, whole: int) -> None:
    if part < 1 or whole % part:
        raise ValueError(describe(f"{what} must divide {whole}", got=part))
