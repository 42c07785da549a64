"""Draws small models of a family and writes a reference folder of each: weights and config.json as transformers saves them, and one
step's loss, gradients and layers by the same classes in float64.

    drawn_families.py FOLDER FAMILY[,FAMILY...] SEED FIRST COUNT     writes FOLDER/FAMILY-SEED-NUMBER, numbers from FIRST on

The folders have the format of tests/golden; each number is drawn apart, so that one alone can be made again. Prints a line a folder:
its name, and the largest difference that float32 makes inside transformers.
"""
import contextlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
import warnings

import drawn_sizes as sizes
import torch
from safetensors.torch import load_file, save_file

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import transformers  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek  # noqa: E402
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe  # noqa: E402
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen35  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next  # noqa: E402

torch.set_num_threads(1)


@contextlib.contextmanager
def float64():
    """Every request for float32 inside transformers is one for float64."""
    kept = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept[:3]
        torch.set_default_dtype(kept[3])


# Family: its draw, and the layer of its depths of multi-token prediction with the names of their own tensors.
families = {
    "llama": (sizes.llama, None),
    "mistral": (sizes.mistral, None),
    "qwen2": (sizes.qwen2, None),
    "qwen3": (sizes.qwen3, None),
    "qwen3_moe": (sizes.qwen3_moe, None),
    "qwen3_next": (sizes.qwen3_next, qwen3_next.Qwen3NextDecoderLayer),
    "qwen3_5_text": (sizes.qwen3_5_text, None),
    "qwen3_5_moe_text": (sizes.qwen3_5_moe_text, qwen35.Qwen3_5MoeDecoderLayer),
    "gpt_oss": (sizes.gpt_oss, None),
    "deepseek_v3": (sizes.deepseek_v3, deepseek.DeepseekV3DecoderLayer),
    "glm4_moe": (sizes.glm4_moe, glm4_moe.Glm4MoeDecoderLayer),
    "gemma3_text": (sizes.gemma3, None),
    "nemotron_h": (sizes.nemotron_h, None),
}


# Families whose depths are layers behind the last.
layers_behind = ("deepseek_v3", "glm4_moe")


class Depths(torch.nn.Module):
    """Multi-token prediction (docs/spec/language-model.md §5.4), of which transformers trains none."""

    def __init__(self, model, config, depths):
        super().__init__()
        self.own = config.model_type not in layers_behind
        h, layer = config.hidden_size, families[config.model_type][1]
        self.depths = torch.nn.ModuleList()
        for depth in range(depths):
            parts, norm = torch.nn.Module(), type(model.model.norm)
            for name in ("enorm", "hnorm", "norm"):
                setattr(parts, name, norm(h, eps=config.rms_norm_eps))
            parts.eh_proj = torch.nn.Linear(2 * h, h, bias=False)
            parts.layer = layer(self.config(config), 0 if self.own else config.num_hidden_layers + depth)
            self.depths.append(parts)

    def config(self, config):
        """A layer of attention and experts, whatever the main part's layers are."""
        if not self.own:
            return config
        alone = dict(config.to_dict(), layer_types=["full_attention"], num_hidden_layers=1)
        alone |= {key: value for key, value in dict(mlp_only_layers=[], decoder_sparse_step=1).items() if key in alone}
        made = type(config)(**alone)
        made._attn_implementation = made._experts_implementation = "eager"
        return made

    def forward(self, model, hidden, tokens):
        """Σ of the depths' losses, and each; `hidden`: behind the last norm."""
        losses, routers = [], []
        for depth, parts in enumerate(self.depths):
            hidden = hidden[:, :-1]
            length = hidden.shape[1]
            embedded = model.model.embed_tokens(tokens[:, depth + 1 : depth + 1 + length])
            joined = parts.eh_proj(torch.cat([parts.enorm(embedded), parts.hnorm(hidden)], -1))
            place = torch.arange(length)[None]
            turned = model.model.rotary_emb(joined, place if model.config.model_type != "qwen3_5_moe_text" else place[None].expand(3, 1, -1))
            mask = torch.full((length, length), torch.finfo(joined.dtype).min, dtype=joined.dtype).triu(1)[None, None]
            made = parts.layer(joined, position_embeddings=turned, attention_mask=mask, position_ids=place)
            hidden = parts.norm(made[0] if isinstance(made, tuple) else made)
            logits = model.lm_head(hidden)
            losses.append(cross_entropy(logits, tokens[:, depth + 2 :]))
        return losses

    def published(self, layers):
        """Tensors as their folders have them, experts one by one; values or gradients."""
        for depth, parts in enumerate(self.depths):
            at = "mtp." if self.own else f"model.layers.{layers + depth}."
            own = dict(enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden", norm="norm", eh_proj="fc") if self.own else dict(norm="shared_head.norm")
            state = dict(parts.named_parameters()) | dict(parts.named_buffers())
            for name, value in state.items():
                head, _, rest = name.partition(".")
                if head != "layer":
                    yield f"{at}{own.get(head, head)}.{rest}", value, lambda x: x
                    continue
                place = f"{at}layers.{depth}." if self.own else at
                if not rest.startswith("mlp.experts."):
                    yield place + rest, value, lambda x: x
                    continue
                for expert in range(value.shape[0]):
                    if rest.endswith("gate_up_proj"):
                        half = value.shape[1] // 2
                        yield f"{place}mlp.experts.{expert}.gate_proj.weight", value, lambda x, e=expert, f=half: x[e, :f]
                        yield f"{place}mlp.experts.{expert}.up_proj.weight", value, lambda x, e=expert, f=half: x[e, f:]
                    else:
                        yield f"{place}mlp.experts.{expert}.down_proj.weight", value, lambda x, e=expert: x[e]


def build(config, depths):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.eval()
    return model, Depths(model, model.config, depths)


def fill(modules, generator):
    """Weights with which every term counts: no gain of 1 or 0, no zero bias, queries and keys wide enough to look somewhere."""
    normal = lambda shape: torch.randn(shape, generator=generator)
    uniform = lambda shape, low, high: low + (high - low) * torch.rand(shape, generator=generator)
    for module in modules:
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            end, shape = name.rsplit(".", 1)[-1], value.shape
            if "inv_freq" in name or end in ("original_inv_freq", "embed_scale") or not value.is_floating_point():
                continue
            if end == "e_score_correction_bias":
                new = uniform(shape, -0.05, 0.05)
            elif end == "A_log":
                new = uniform(shape, 0.5, 4.0).log()
            elif end == "dt_bias":
                new = uniform(shape, -3.0, 0.5)
            elif end == "D":
                new = uniform(shape, 0.5, 1.5)
            elif end == "sinks":
                new = 1.5 + 0.5 * normal(shape)
            elif "conv1d" in name:
                new = 0.4 * normal(shape)
            elif "patch_embed" in name and value.dim() > 1:
                new = normal(shape) / math.sqrt(value[0].numel())
            elif value.dim() == 1:
                gain = end == "weight"
                new = 0.2 * normal(shape)
                if gain and bool((value == 1).all()):
                    new += 1
            elif "embed" in name:
                new = 0.5 * normal(shape)
            elif end.endswith("_bias"):
                new = 0.2 * normal(shape)
            else:
                # Stacks of gpt-oss have the input first; any width near it will do.
                new = normal(shape) / math.sqrt(shape[-1])
            value.data.copy_(new)


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def step(model, depths, tokens):
    """One step's values and gradients."""
    layers, hooks = [], []
    parts = model.model.layers
    keep = lambda _, __, output: layers.append(output[0] if isinstance(output, tuple) else output)
    hooks = [layer.register_forward_hook(keep) for layer in parts]
    last = []
    ending = model.model.norm if hasattr(model.model, "norm") else model.model.norm_f
    hooks.append(ending.register_forward_hook(lambda _, __, output: last.append(output)))
    balanced = getattr(model.config, "output_router_logits", False) and model.config.model_type != "nemotron_h"
    output = model(input_ids=tokens[:, :-1], use_cache=False, **({"output_router_logits": True} if balanced else {}))
    for hook in hooks:
        hook.remove()
    loss = cross_entropy(output.logits, tokens[:, 1:])
    aux = output.aux_loss if balanced and torch.is_tensor(output.aux_loss) else None
    further = depths(model, last[0], tokens)
    whole = loss + (model.config.router_aux_loss_coef * aux if aux is not None else 0)
    if further:
        whole = whole + 0.3 / len(further) * sum(further)
    whole.backward()
    return dict(loss=loss, aux=aux, further=further, layers=layers, logits=output.logits)


def probe(x):
    x = x.detach().double().reshape(-1)
    return dict(mean=x.mean().item(), rms=x.square().mean().sqrt().item(), head=x[:6].tolist())


def gradients(model, depths, folder):
    """Every published tensor's gradient: transformers saves them in place of the weights."""
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    with tempfile.TemporaryDirectory(dir=folder) as place:
        model.save_pretrained(place)
        found = load_file(os.path.join(place, "model.safetensors"))
    for name, value, part in depths.published(model.config.num_hidden_layers):
        if value.requires_grad:
            found[name] = part(torch.zeros_like(value) if value.grad is None else value.grad)
    return {name: value.double().norm().item() for name, value in found.items() if "e_score_correction_bias" not in name}


def older_form(c):
    """config.json as transformers 4 writes rotary embeddings."""
    rope = c.pop("rope_parameters")
    if "full_attention" in rope:
        c["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    c["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        c["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    c["rope_scaling"] = None if kind == "default" and "mrope_section" not in rope else dict(rope, type=kind)


def write(folder, family, seed, number):
    r = random.Random(f"{family} {seed} {number}")
    while not attempt(folder, family, r):
        shutil.rmtree(folder)


def attempt(folder, family, r):
    """
    Whether gradients are well conditioned in the model drawn, so that another program has them too: float32 inside transformers, and
    weights moved by a rounding of float32, change their norms little.
    """
    drawn = families[family][0](r)
    depths = drawn.pop("depths", 0)
    if depths and "output_router_logits" in drawn:
        # transformers' balancing loss is of the main part alone, as it has no other.
        drawn["output_router_logits"] = False
    config = lambda: transformers.AutoConfig.for_model(family, **drawn)
    model, further = build(config(), depths)
    fill([model, further], torch.Generator().manual_seed(r.randrange(2**31)))
    model.tie_weights()
    os.makedirs(folder)
    model.save_pretrained(folder)
    weights = load_file(os.path.join(folder, "model.safetensors"))
    for name, value, part in further.published(model.config.num_hidden_layers):
        weights[name] = part(value.detach()).contiguous().clone()
    save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    path = os.path.join(folder, "config.json")
    written = json.load(open(path))
    if depths:
        written["num_nextn_predict_layers" if family in layers_behind else "mtp_num_hidden_layers"] = depths
    # In transformers gpt-oss has YaRN where that form says none.
    plain = family == "gpt_oss" and written["rope_parameters"]["rope_type"] == "default"
    if "rope_parameters" in written and not plain and r.random() < 0.4:
        older_form(written)
    json.dump(written, open(path, "w"), indent=2)

    batch, length = r.choice([1, 2, 3]), r.choice([17, 33, 64, 80, 130])
    tokens = torch.tensor([[r.randrange(drawn["vocab_size"]) for _ in range(length + 1)] for _ in range(batch)])
    save_file({"tokens": tokens.int()[None]}, os.path.join(folder, "batches.safetensors"))
    step(model, further, tokens)
    with float64():
        for rounding in (0, 6e-8):
            exact, own = build(config(), depths)
            for to, of in ((exact, model), (own, further)):
                to.double()
                names = dict(to.named_parameters()) | dict(to.named_buffers())
                for name, value in [*of.named_parameters(), *of.named_buffers()]:
                    if "inv_freq" not in name and not name.endswith("embed_scale"):
                        value = value.detach().double()
                        names[name].data.copy_(value + rounding * value * (2 * torch.rand_like(value) - 1))
            made = step(exact, own, tokens)
            if rounding:
                moved = gradients(exact, own, folder)
            else:
                double, norms = made, gradients(exact, own, folder)
    coarse = gradients(model, further, folder)
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    # Such as that of a key's norm where a token sees itself alone: zero, but for rounding.
    norms = {name: norm if norm > 1e-12 * total else 0.0 for name, norm in norms.items()}
    noise = max(abs(other[name] / norm - 1) for other in (coarse, moved) for name, norm in norms.items() if norm > 0)
    if noise > 2e-6:
        return False
    aux, losses = double["aux"], double["further"]
    golden = dict(
        source=f"transformers {type(exact).__name__}",
        dtype="float32",
        optimizer=dict(name="AdamW", lr=1e-3, betas=[0.9, 0.95], eps=1e-6, weight_decay=0.1, no_weight_decay=[name for name in norms if weights[name].dim() == 1 or "conv1d" in name], clip_grad=1.0, schedule="constant"),
        exact_steps=1,
        batch=batch,
        seq=length,
        steps=[
            dict(step=1, loss=double["loss"].item(), grad_norm=total, loss_band=0, grad_norm_band=0)
            | ({} if aux is None else dict(aux_loss=aux.item(), aux_loss_band=0))
            | {f"mtp_{depth + 1}_loss": loss.item() for depth, loss in enumerate(losses)}
        ],
        step1_probe=dict(layers=[probe(x) for x in double["layers"]] + [probe(double["logits"])] * depths, logits=probe(double["logits"]), grad_norm=norms),
        **({"objective": "loss + 0.3 / depths * sum of mtp_k_loss"} if losses else {}),
    )
    json.dump(golden, open(os.path.join(folder, "golden.json"), "w"), indent=1)
    print(f"{os.path.basename(folder)} {noise:.1e}", flush=True)
    return True


if __name__ == "__main__":
    seed, first, count = map(int, sys.argv[3:6])
    for family in sys.argv[2].split(","):
        for number in range(first, first + count):
            write(os.path.join(sys.argv[1], f"{family}-{seed}-{number}"), family, seed, number)
