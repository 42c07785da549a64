"""Experts in float64 PyTorch: 200 random layers with their gradients, and Qwen3-MoE's sparse block of transformers.

    python tests/golden/tools/make_experts.py tests/golden/experts

Inputs come from the generator of tests/support.ts (randomValues), so that a case is its sizes and what came out: of every
tensor v the sums of v_i r_i and of v_i squared, r from the same generator. Layers: docs/spec/moe-performance.md §1.
"""
import json
import math
import random
import sys
from pathlib import Path

import numpy
import torch

torch.set_default_dtype(torch.float64)


def random_values(count, seed, scale=1.0):
    """mulberry32, uniform in [-1, 1), float32."""
    state = (seed + 0x6D2B79F5 * numpy.arange(1, count + 1, dtype=numpy.uint64)).astype(numpy.uint32)
    t = (state ^ (state >> numpy.uint32(15))) * (state | numpy.uint32(1))
    t = (t + (t ^ (t >> numpy.uint32(7))) * (t | numpy.uint32(61))) ^ t
    unit = (t ^ (t >> numpy.uint32(14))).astype(numpy.float64) / 2**31 - 1
    return torch.tensor((unit * scale).astype(numpy.float32).astype(numpy.float64))


def digest(tensor, seed):
    flat = tensor.detach().reshape(-1)
    return [float(f"{(flat @ random_values(flat.numel(), seed)).item():.12g}"), float(f"{(flat @ flat).item():.12g}")]


def activation(case, z):
    kind, clamp = case["activation"], case["clamp"] or math.inf
    if kind == "squaredRelu":
        return torch.relu(z) ** 2
    size = case["interleave"]
    if size:
        blocks = z.reshape(z.shape[0], case["width"] // size, 2, size)
        gate, linear = (blocks[:, :, half].reshape(z.shape[0], case["width"]) for half in (0, 1))
    else:
        gate, linear = z.chunk(2, dim=1)
    gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
    if kind == "swiglu":
        return gate * torch.sigmoid(gate) * linear
    return gate * torch.sigmoid(1.702 * gate) * (linear + case["linearOffset"])


def run(case):
    loads, hidden, width, seed = case["loads"], case["hidden"], case["width"], case["seed"]
    experts, rows = len(loads), sum(loads)
    z_width = width if case["activation"] == "squaredRelu" else 2 * width
    shapes = {
        "x": ([rows, hidden], 1),
        "p": ([rows], 1),
        "w1": ([experts, z_width, hidden], 1 / math.sqrt(hidden)),
        "w2": ([experts, hidden, width], 1 / math.sqrt(width)),
        "b1": ([experts, z_width], 0.5),
        "b2": ([experts, hidden], 0.5),
    }
    names = [name for name in shapes if case["biases"] or not name.startswith("b")]
    values = {}
    for at, name in enumerate(names):
        shape, scale = shapes[name]
        values[name] = random_values(math.prod(shape), seed + at, scale).reshape(shape).requires_grad_()
    parts, first = [], 0
    for g, load in enumerate(loads):
        x, p = values["x"][first : first + load], values["p"][first : first + load, None]
        z = x @ values["w1"][g].T
        if case["biases"]:
            z = z + values["b1"][g]
        y = (p * activation(case, z)) @ values["w2"][g].T
        if case["biases"]:
            y = y + p * values["b2"][g]
        parts.append(y)
        first += load
    y = torch.cat(parts)
    (y * random_values(y.numel(), seed + 10).reshape(y.shape)).sum().backward()
    found = {"y": digest(y, seed + 20)}
    for at, name in enumerate(names):
        found[f"d{name}"] = digest(values[name].grad, seed + 21 + at)
    return {**case, "found": found}


def random_case(source, number):
    kind = source.choice(["squaredRelu", "swiglu", "swiglu", "quickGeglu", "quickGeglu"])
    gated = kind != "squaredRelu"
    interleave = source.choice([0, 2, 3, 4, 8]) if gated else 0
    width = interleave * source.randint(1, 6) if interleave else source.randint(1, 48)
    loads = [source.choice([0, 1, source.randint(1, 12), source.randint(1, 90)]) for _ in range(source.randint(1, 7))]
    if sum(loads) == 0:
        loads[0] = 3
    return {
        "seed": 1000 * number + 17,
        "loads": loads,
        "hidden": source.randint(1, 40),
        "width": width,
        "activation": kind,
        "clamp": source.choice([None, 0.5, 1, 7]) if gated else None,
        "linearOffset": source.choice([0, 0.5, 1]) if kind == "quickGeglu" else 0,
        "interleave": interleave,
        "biases": source.random() < 0.5,
    }


def qwen():
    """x + block(norm(x)) of Qwen3-MoE with weights of the generator, its output and the gradients."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_experts=6, num_experts_per_tok=2,
        norm_topk_prob=True, num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        decoder_sparse_step=1, mlp_only_layers=[], hidden_act="silu", rms_norm_eps=1e-6, attn_implementation="eager",
    )
    layer = Qwen3MoeDecoderLayer(config, 0).double()
    block, norm = layer.mlp, layer.post_attention_layernorm
    state = {name: value for name, value in block.named_parameters()}
    seeds = {"norm": 1, "router": 2, "fc1": 3, "fc2": 4, "x": 5, "dy": 6}
    draw = lambda name, shape, scale: random_values(math.prod(shape), seeds[name], scale).reshape(shape)
    weights = {
        "norm": 1 + draw("norm", [16], 0.2),
        "router": draw("router", [6, 16], 0.5),
        "fc1": draw("fc1", [6, 24, 16], 0.3),
        "fc2": draw("fc2", [6, 16, 12], 0.3),
    }
    targets = {"router": "gate.weight", "fc1": "experts.gate_up_proj", "fc2": "experts.down_proj"}
    with torch.no_grad():
        norm.weight.copy_(weights["norm"])
        for name, target in targets.items():
            assert state[target].shape == weights[name].shape, (target, state[target].shape)
            state[target].copy_(weights[name])
    x = draw("x", [1, 20, 16], 1).requires_grad_()
    mixed = block(norm(x))
    y = x + (mixed[0] if isinstance(mixed, tuple) else mixed)
    (y * draw("dy", [1, 20, 16], 1)).sum().backward()
    gradients = {"norm": norm.weight.grad, **{name: state[target].grad for name, target in targets.items()}, "x": x.grad}
    numbers = lambda tensor: [float(f"{value:.9g}") for value in tensor.detach().reshape(-1).tolist()]
    return {
        "seeds": seeds, "hidden": 16, "width": 12, "experts": 6, "topk": 2, "tokens": 20, "epsilon": 1e-6,
        "y": numbers(y), "gradients": {name: numbers(value) for name, value in gradients.items()},
    }


folder = Path(sys.argv[1])
source = random.Random(4711)
cases = [run(random_case(source, number)) for number in range(200)]
lines = ",\n".join(json.dumps(case) for case in cases)
(folder / "cases.json").write_text(f"[\n{lines}\n]\n")
(folder / "qwen3-moe.json").write_text(json.dumps(qwen()) + "\n")
