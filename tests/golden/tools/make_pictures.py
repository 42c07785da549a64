"""Reference runs of vision-language models by transformers, in the form of the other folders of pictures (tests/golden/README.md).

    python tests/golden/tools/make_pictures.py NAME FOLDER      (needs torch, transformers >= 5.23, safetensors)

NAME is one of the cases at the end of this file. float32 on a CPU, eager attention, one thread, no dropout, no auxiliary loss. Bands are
of a float64 run, in which every request of transformers for float32 becomes one for float64, and of three runs whose weights were moved
by 1e-7.
"""
import json, os, sys
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

torch.set_num_threads(1)
STEPS = 6
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<eos>", "<image>", "<video>",
           "<begin>", "<end>", "<before>", "<after>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPTIMIZER = {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


def tokenizer(**attributes):
    """Bytes and sixteen special tokens before them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(SPECIAL + alphabet)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<pad>", **attributes)


def drawn(model, seed):
    """Weights by which every term counts: no gain of one, no bias of zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.ndim < 2:
            scale, mean = (0.3, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            fan = parameter[0].numel()
            scale, mean = (1.0 if "position" in name or "embed_tokens" in name else 1.5 * fan ** -0.5), 0.0
        parameter.data.copy_((mean + scale * noise).to(parameter.dtype))
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.rand(buffer.shape, generator=generator) - 0.05)


class Double:
    """Inside, requests for float32 are requests for float64."""

    def __enter__(self):
        self.kept = (torch.Tensor.float, torch.Tensor.to, torch.nn.functional.softmax, torch.get_default_dtype())
        to, softmax = self.kept[1:3]
        wide = lambda value: torch.float64 if value is torch.float32 else value
        torch.Tensor.float = lambda self, *_, **__: to(self, torch.float64)
        torch.Tensor.to = lambda self, *args, **named: to(self, *map(wide, args), **{k: wide(v) for k, v in named.items()})
        torch.nn.functional.softmax = lambda *args, **named: softmax(*args, **{k: wide(v) for k, v in named.items()})
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.Tensor.float, torch.Tensor.to, torch.nn.functional.softmax, kind = self.kept
        torch.set_default_dtype(kind)


def statistics(value):
    flat = value.detach().double().flatten()
    wave = (flat * torch.cos(torch.arange(len(flat), dtype=torch.float64))).sum() / len(flat) ** 0.5
    return {
        "shape": list(value.shape), "mean": flat.mean().item(), "rms": flat.square().mean().sqrt().item(), "wave": wave.item(),
        "head": flat[:6].tolist(), "tail": flat[-6:].tolist(),
    }


def forward(model, batch):
    inputs = {k: v for k, v in batch.items() if k not in ("labels",)}
    inputs = {k: (v.to(next(model.parameters()).dtype) if v.is_floating_point() else v.long()) for k, v in inputs.items()}
    logits = model(**inputs, use_cache=False).logits
    labels = batch["labels"].long()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return logits, loss


def train(model, batches, published):
    """Losses and gradient norms of all steps; gradient norms of tensors of the first."""
    named = dict(model.named_parameters())
    decay = lambda wanted: [p for p in named.values() if (p.ndim >= 2) == wanted]
    optimizer = torch.optim.AdamW(
        [{"params": decay(True), "weight_decay": OPTIMIZER["weight_decay"]}, {"params": decay(False), "weight_decay": 0.0}],
        lr=OPTIMIZER["lr"], betas=tuple(OPTIMIZER["betas"]), eps=OPTIMIZER["eps"],
    )
    steps, first = [], {}
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        _, loss = forward(model, batch)
        loss.backward()
        if not steps:
            first = {name: p.grad for name, p in named.items() if p.grad is not None}
            first = {name: grad.detach().clone() for name, grad in first.items()}
        norm = torch.nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps, first


def make(name, folder):
    case = CASES[name]
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(1)
    config = case.config()
    config._attn_implementation = "eager"
    build = lambda: case.model(config).train()
    model = build()
    drawn(model, case.seed)
    model.save_pretrained(folder)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    processor = case.processor()
    processor.save_pretrained(folder)
    raw = np.random.default_rng(11)
    batches = [case.batch(config, processor, raw) for _ in range(STEPS)]
    save_file({f"{step + 1}.{k}": (v if v.is_floating_point() else v.to(torch.int32)).contiguous() for step, b in enumerate(batches) for k, v in b.items()},
              os.path.join(folder, "batches.safetensors"))

    activations = {}
    hooks = case.probes(model, lambda key, value: activations.update({key: value.detach()}))
    with torch.no_grad():
        activations["logits"] = forward(model, batches[0])[0]
    for hook in hooks:
        hook.remove()

    own, gradients = train(model, batches, None)
    with Double():
        exact = build().double()
        exact.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()})
        others = [train(exact, batches, None)[0]]
    for seed in range(3):
        moved = build()
        generator = torch.Generator().manual_seed(100 + seed)
        with torch.no_grad():
            moved.load_state_dict(state)
            for parameter in moved.parameters():
                parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
        others.append(train(moved, batches, None)[0])
    steps, bands = [], [0.0, 0.0]
    for step, (loss, norm) in enumerate(own):
        for other in others:
            bands = [max(band, abs(a - b) / abs(a)) for band, a, b in zip(bands, (loss, norm), other[step])]
        steps.append({"step": step + 1, "loss": loss, "grad_norm": norm, "loss_band": bands[0], "grad_norm_band": bands[1],
                      "loss_tokens": int((batches[step]["labels"] != -100).sum())})

    # Names of the file by value: transformers renames on the way out.
    stored = load_file(os.path.join(folder, "model.safetensors"))
    published = case.published(state, stored)
    norms = {}
    for inner, gradient in gradients.items():
        for outer, part in published(inner, gradient):
            norms[outer] = part.double().norm().item()
    golden = {
        "source": f"transformers {case.model.__name__}", "torch": torch.__version__.split("+")[0], "transformers": transformers.__version__,
        "dtype": "float32", "device": "cpu", "attention": "eager", "dropout": "all 0", "auxiliary_loss": "none",
        "optimizer": {**OPTIMIZER, "no_weight_decay": sorted(k for k, v in stored.items() if v.ndim < 2), "clip_grad": 1.0, "schedule": "constant"},
        "exact_steps": STEPS, "batch": batches[0]["input_ids"].shape[0], "seq": batches[0]["input_ids"].shape[1],
        "steps": steps,
        "step1_probe": {
            "activations": {k: statistics(v) for k, v in activations.items()},
            "grad_norm": dict(sorted(norms.items())), "no_gradient": sorted(set(stored) - set(norms)),
        },
    }
    with open(os.path.join(folder, "golden.json"), "w") as file:
        json.dump(golden, file, indent=1)
    print(name, "loss", [round(s["loss"], 4) for s in steps], "bands", bands, "exact", max(abs(a[0] - b[0]) / a[0] for a, b in zip(own, others[0])))


def same_values(state, stored):
    """Names in the file of the model's parameters, each the same tensor."""
    known = {}
    for outer, value in stored.items():
        known.setdefault((tuple(value.shape), value.double().sum().item(), value.flatten()[0].item()), outer)

    def published(inner, gradient):
        value = state[inner]
        return [(known[(tuple(value.shape), value.double().sum().item(), value.flatten()[0].item())], gradient)]

    return published


def picture(raw, height, width):
    """Pixels of few values, which compress well."""
    return torch.from_numpy((raw.integers(0, 12, (3, height, width)) * 23).astype(np.uint8))


def ids_of(raw, samples, length, placeholder, vocabulary, counts):
    """Random text with runs of placeholders between, and labels of the next token where neither is a placeholder."""
    ids = torch.from_numpy(raw.integers(len(SPECIAL), vocabulary, (samples, length)))
    for sample, runs in enumerate(counts):
        at = 3 + sample
        for count in runs:
            ids[sample, at:at + count] = placeholder
            at += count + 2
            assert at < length, (at, length)
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[labels == placeholder] = -100
    labels[0, :5] = -100
    return ids, labels


def tower_probes(keep, layers, projector, text, norm):
    def record(name, value):
        keep(name, value)

    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(layer.register_forward_hook(lambda m, a, k, out, index=index: (
            record("vision.layer.0.input", (a[0] if a else k["hidden_states"])) if index == 0 else None,
            record(f"vision.layer.{index}", out[0] if isinstance(out, tuple) else out))[1], with_kwargs=True))
    hooks.append(projector.register_forward_hook(lambda m, a, out: (record("projector.input", a[0]), record("projector", out))[0]))
    for index, layer in enumerate(text):
        hooks.append(layer.register_forward_hook(lambda m, a, k, out, index=index: (
            record(f"language.layer.{index}.input", (a[0] if a else k["hidden_states"])),
            record(f"language.layer.{index}", out[0] if isinstance(out, tuple) else out))[1], with_kwargs=True))
    hooks.append(norm.register_forward_hook(lambda m, a, out: record("language.norm", out)))
    return hooks


class LlavaOnevision:
    """SigLIP without the norm, tiles of 26 pixels in patches of 4 (two pixels are left out), Qwen2 with biases."""

    model, seed = transformers.LlavaOnevisionForConditionalGeneration, 7
    pinpoints = [[26, 26], [26, 52], [52, 26], [52, 52], [26, 78], [78, 26]]
    published = staticmethod(same_values)

    def config(self):
        return transformers.LlavaOnevisionConfig(
            vision_config=dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=56, num_hidden_layers=2,
                               num_attention_heads=2, patch_size=4, image_size=26, vision_use_head=False),
            text_config=dict(model_type="qwen2", hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=272, max_position_embeddings=512),
            image_token_index=10, video_token_index=11, image_grid_pinpoints=self.pinpoints, vision_aspect_ratio="anyres_max_2")

    def processor(self):
        images = transformers.LlavaOnevisionImageProcessor(size={"height": 26, "width": 26}, image_grid_pinpoints=self.pinpoints)
        return transformers.LlavaOnevisionProcessor(
            images, tokenizer(), transformers.LlavaOnevisionVideoProcessor(size={"height": 26, "width": 26}), num_image_tokens=36,
            vision_feature_select_strategy="full", chat_template=TEMPLATE, vision_aspect_ratio="anyres_max_2")

    def batch(self, config, processor, raw):
        side = lambda low, high: int(raw.integers(low, high))
        # A wide one, two in a sample, text alone, one whose rows are resized.
        pictures = [[picture(raw, side(8, 20), side(40, 90))], [picture(raw, side(10, 60), side(10, 60)) for _ in range(2)],
                    [], [picture(raw, side(44, 60), side(44, 60))]]
        made = processor.image_processor([own for own in pictures if own], return_tensors="pt")
        sizes = iter(made["image_sizes"].tolist())
        counts = []
        for own in pictures:
            rows = [processor._get_number_of_features(*next(sizes), 26, 26) for _ in own]
            counts.append(rows if len(own) == 1 else [37] * len(own))
        ids, labels = ids_of(raw, len(pictures), 160, config.image_token_id, 272, counts)
        return {"input_ids": ids, "labels": labels, **{k: torch.as_tensor(v) for k, v in made.items()}}

    def probes(self, model, record):
        inner = model.model
        return tower_probes(record, inner.vision_tower.encoder.layers, inner.multi_modal_projector,
                            inner.language_model.layers, inner.language_model.norm)


class Glm4vMoe:
    """Patches of all sizes under a norm and a table by the bicubic filter, MLPs with gates; half of a head turns, by three axes; a dense layer and experts."""

    model, seed = transformers.Glm4vMoeForConditionalGeneration, 11

    def config(self):
        made = transformers.Glm4vMoeConfig(
            vision_config=dict(depth=2, hidden_size=32, num_heads=2, image_size=26, patch_size=4, out_hidden_size=48, intermediate_size=40),
            text_config=dict(hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                             vocab_size=272, max_position_embeddings=512, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
                             routed_scaling_factor=1.5, pad_token_id=None,
                             rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])),
            image_token_id=10, video_token_id=11, image_start_token_id=12, image_end_token_id=13)
        made.text_config._experts_implementation = "eager"
        return made

    def processor(self):
        images = transformers.Glm4vImageProcessor(patch_size=4, size={"shortest_edge": 512, "longest_edge": 3072})
        named = tokenizer(extra_special_tokens={"image_token": "<image>", "video_token": "<video>"})
        return transformers.Glm4vProcessor(images, named, transformers.Glm4vVideoProcessor(patch_size=4), chat_template=TEMPLATE)

    def batch(self, config, processor, raw):
        side = lambda low, high: int(raw.integers(low, high))
        # A wide one that is enlarged, two in a sample, text alone.
        pictures = [[picture(raw, side(5, 8), side(30, 60))], [picture(raw, side(10, 60), side(10, 60)) for _ in range(2)], []]
        made = processor.image_processor([one for own in pictures for one in own], return_tensors="pt")
        rows = iter((made["image_grid_thw"].prod(-1) // 4).tolist())
        ids, labels = ids_of(raw, len(pictures), 120, config.image_token_id, 272, [[next(rows) for _ in own] for own in pictures])
        return {"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == config.image_token_id).long(), **made}

    def probes(self, model, record):
        tower, text = model.model.visual, model.model.language_model
        kept = lambda name, value: None if name == "projector.input" else record("vision.merger" if name == "projector" else name, value)
        return [*tower_probes(kept, tower.blocks, tower.merger, text.layers, text.norm),
                tower.patch_embed.register_forward_hook(lambda m, a, out: record("vision.patch_embed", out))]

    @staticmethod
    def published(state, stored):
        """Experts are stacked in memory, the gate's rows before the others."""
        def parts(name, value):
            layer, _, kind = name.partition("experts.")
            if kind not in ("gate_up_proj", "down_proj"):
                return [(name, value)]
            halves = [("down_proj", value)] if kind == "down_proj" else zip(("gate_proj", "up_proj"), value.chunk(2, 1))
            return [(f"{layer}experts.{e}.{half}.weight", one) for half, rows in halves for e, one in enumerate(rows)]
        assert all(outer in stored for name in state for outer, _ in parts(name, state[name])), set(state) - set(stored)
        return parts


CASES = {"llava-onevision": LlavaOnevision(), "glm4v-moe": Glm4vMoe()}

if __name__ == "__main__":
    make(*sys.argv[1:])
