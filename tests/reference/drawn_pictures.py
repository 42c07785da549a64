"""Draws small vision-language models of a family, and towers alone, and writes a reference folder of each: weights and config.json as
transformers saves them, and one step's loss, gradients and values by the same classes in float64.

    drawn_pictures.py FOLDER FAMILY[,FAMILY...] SEED FIRST COUNT     writes FOLDER/FAMILY-SEED-NUMBER, numbers from FIRST on

As drawn_families.py, in the format of tests/golden's folders of pictures.
"""
import json
import math
import os
import random
import shutil
import sys
import tempfile

import numpy as np
import torch
from drawn_families import fill, float64, older_form
from drawn_sizes import glm4_moe, gpt_oss, llama, mistral, nemotron_h, qwen2, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_moe
from drawn_towers import glm_tower, internvit, qwen25_tower, qwen_tower, radio, siglip
from safetensors.torch import load_file, save_file

import transformers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden/tools"))
from make_pictures import picture, statistics, tower_probes  # noqa: E402


def text(r, *families, **more):
    """A language model's fields; its width stands apart, as others need it."""
    family = r.choice(families)
    drawn = family(r) | dict(output_router_logits=False) | more
    drawn.pop("depths", None)
    return dict(drawn, model_type=family.__name__, pad_token_id=None)


def mrope(r, c, interleaved):
    """Positions on three axes, whose frequencies have sections of any size."""
    pairs = (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]) // 2
    across = r.randint(1, pairs // 3)
    sections = [pairs - 2 * across, across, across]
    return c | dict(rope_parameters=dict(rope_type="default", rope_theta=r.choice([1e4, 1e6, 5e6]), mrope_section=sections)
                    | (dict(mrope_interleaved=True) if interleaved else {}))


class Case:
    """A family: `draw` gives config.json's fields, `inputs` a batch's beside its text with the rows of every sample's pictures."""

    def __init__(self, kind, draw, inputs, parts):
        self.kind, self.draw, self.inputs, self.parts = kind, draw, inputs, parts


def normal(r, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(r.randrange(2**31)))


def samples_of(r):
    """How many pictures each sample has; there is one at least."""
    while True:
        counts = [r.choice([0, 1, 1, 2]) for _ in range(r.choice([1, 2, 3]))]
        if any(counts):
            return counts


# Qwen: patches of pictures of all sizes in blocks of four.


def qwen_inputs(r, config):
    vision = config.vision_config
    merge, values = vision.spatial_merge_size, 3 * vision.temporal_patch_size * vision.patch_size**2
    counts = samples_of(r)
    grids = [[1, merge * r.randint(1, 5), merge * r.randint(1, 5)] for _ in range(sum(counts))]
    rows = iter([h * w // merge**2 for _, h, w in grids])
    return [[next(rows) for _ in range(count)] for count in counts], dict(
        pixel_values=normal(r, sum(h * w for _, h, w in grids), values), image_grid_thw=torch.tensor(grids))


def qwen_parts(model, keep):
    tower, language = model.model.visual, model.model.language_model
    hooks = tower_probes(lambda name, value: None if name.startswith("projector") else keep(name, value), tower.blocks, tower.merger, language.layers, language.norm)
    # Of Qwen2.5-VL in the picture's order, not in that of windows.
    hooks.append(tower.register_forward_hook(lambda m, a, out: keep("vision.merger", out.pooler_output)))
    # Behind the last layer too DeepStack adds its rows.
    hooks.append(language.norm.register_forward_hook(lambda m, a, out: keep(f"language.layer.{len(language.layers)}.input", a[0])))
    hooks.append(tower.patch_embed.register_forward_hook(lambda m, a, out: keep("vision.patch_embed", out)))
    for index, merger in enumerate(getattr(tower, "deepstack_merger_list", [])):
        hooks.append(merger.register_forward_hook(lambda m, a, out, index=index: keep(f"vision.deepstack.{index}", out)))
    return hooks


def qwen25_vl(r):
    c = mrope(r, text(r, qwen2), False)
    return dict(text_config=dict(c, model_type="qwen2_5_vl_text"), vision_config=qwen25_tower(r) | dict(out_hidden_size=c["hidden_size"]))


def qwen3_vl(r):
    c = mrope(r, text(r, qwen3), True)
    for name in ("use_sliding_window", "sliding_window", "layer_types"):
        c.pop(name, None)
    return dict(text_config=dict(c, model_type="qwen3_vl_text"), vision_config=qwen_tower(r, True) | dict(out_hidden_size=c["hidden_size"]))


def qwen3_vl_moe(r):
    c = mrope(r, text(r, qwen3_moe), True)
    return dict(text_config=dict(c, model_type="qwen3_vl_moe_text"), vision_config=qwen_tower(r, True) | dict(out_hidden_size=c["hidden_size"]))


def qwen3_5(r):
    c = text(r, qwen3_5_text)
    return dict(text_config=c, vision_config=qwen_tower(r, False) | dict(out_hidden_size=c["hidden_size"]))


def qwen3_5_moe(r):
    c = text(r, qwen3_5_moe_text)
    return dict(text_config=c, vision_config=qwen_tower(r, False) | dict(out_hidden_size=c["hidden_size"]))


def glm4v_moe(r):
    c = text(r, glm4_moe)
    for name in ("use_qk_norm", "num_nextn_predict_layers", "rope_parameters"):
        c.pop(name)
    pairs = c["head_dim"] // 4
    across = r.randint(0, pairs // 3)
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[pairs - 2 * across, across, across])
    return dict(text_config=dict(c, model_type="glm4v_moe_text", rope_parameters=rope), vision_config=glm_tower(r, c["hidden_size"]))


# InternVL and LLaVA: pictures of one size.


def square_inputs(r, config):
    vision = config.vision_config
    side, patch = ([n] if isinstance(n, int) else n for n in (vision.image_size, vision.patch_size))
    side, patch = side[0], patch[0]
    if config.model_type == "internvl" and r.random() < 0.4:
        side = patch * 2 * r.randint(1, 5)
    grid = side // patch
    rows = grid**2 // 4 if config.model_type == "internvl" else grid**2
    counts = samples_of(r)
    return [[rows] * count for count in counts], dict(pixel_values=normal(r, sum(counts), 3, side, side))


def square_parts(model, keep):
    inner = model.model
    tower = getattr(inner.vision_tower, "vision_model", inner.vision_tower)
    layers = tower.encoder.layer if hasattr(tower.encoder, "layer") else tower.encoder.layers
    return tower_probes(keep, layers, inner.multi_modal_projector, inner.language_model.layers, inner.language_model.norm)


def internvl(r):
    return dict(text_config=text(r, qwen2, qwen3, qwen3_moe, llama, gpt_oss), vision_config=internvit(r), downsample_ratio=0.5)


def llava(r):
    tower = siglip(r)
    layers = tower["num_hidden_layers"]
    layer = r.choice([-1, -2, -2, layers, r.randint(1, layers)])
    if r.random() < 0.25:
        layer = sorted(r.sample(range(1, layers + 1), r.randint(1, min(2, layers))))
        layer = [one - layers - 1 for one in layer] if r.random() < 0.5 else layer
    return dict(text_config=text(r, qwen2, qwen3, llama, mistral), vision_config=tower, vision_feature_layer=layer,
                vision_feature_select_strategy="full", multimodal_projector_bias=r.random() < 0.8)


# LLaVA-OneVision: tiles of pictures of all sizes, by its processor.


def onevision(r):
    tower = siglip(r)
    side = tower["image_size"]
    sizes = r.sample([[side * rows, side * columns] for rows in range(1, 4) for columns in range(1, 4)], r.randint(2, 6))
    return dict(text_config=text(r, qwen2, qwen3, llama), vision_config=tower, vision_feature_layer=r.choice([-1, -1, -2]),
                image_grid_pinpoints=sizes, vision_aspect_ratio=f"anyres_max_{r.choice([1, 2, 4, 9])}")


def image_processor(config):
    side = config.vision_config.image_size
    return transformers.LlavaOnevisionImageProcessor(size={"height": side, "width": side}, image_grid_pinpoints=config.image_grid_pinpoints)


def onevision_inputs(r, config):
    side, patch = config.vision_config.image_size, config.vision_config.patch_size
    images = image_processor(config)
    processor = transformers.LlavaOnevisionProcessor.__new__(transformers.LlavaOnevisionProcessor)
    processor.image_processor, processor.patch_size = images, patch
    processor.num_image_tokens, processor.vision_feature_select_strategy = (side // patch) ** 2, "full"
    processor.vision_aspect_ratio = config.vision_aspect_ratio
    raw = np.random.default_rng(r.randrange(2**31))
    counts = samples_of(r)
    pictures = [[picture(raw, r.randint(4, 60), r.randint(4, 60)) for _ in range(count)] for count in counts]
    made = images([own for own in pictures if own], return_tensors="pt")
    sizes = iter(made["image_sizes"].tolist())
    rows = [[processor._get_number_of_features(*next(sizes), side, side) for _ in own] for own in pictures]
    rows = [own if len(own) == 1 else [processor.num_image_tokens + 1] * len(own) for own in rows]
    return rows, {k: torch.as_tensor(v) for k, v in made.items()}


# Nemotron: patches of pictures of all sizes, row by row.


def omni(r):
    # The projector's norm has transformers' 1e-5 whatever the language model has.
    c, tower = nemotron_h(r) | dict(layer_norm_epsilon=1e-5), radio(r)
    return dict(text_config=dict(c, model_type="nemotron_h"), vision_config=tower, vision_hidden_size=tower["hidden_size"], audio_config=None,
                projector_hidden_size=r.choice([24, 40]), video_temporal_patch_size=2)


def omni_inputs(r, config):
    counts = samples_of(r)
    grids = [[2 * r.randint(1, 5), 2 * r.randint(1, 5)] for _ in range(sum(counts))]
    rows = iter([h * w // 4 for h, w in grids])
    return [[next(rows) for _ in range(count)] for count in counts], dict(
        pixel_values=normal(r, sum(h * w for h, w in grids), 3 * config.vision_config.patch_size**2), image_grid_hw=torch.tensor(grids))


def omni_parts(model, keep):
    language = model.language_model.model
    return tower_probes(keep, model.vision_model.encoder.layer, model.multi_modal_projector, language.layers, language.norm_f)


cases = {
    "nemotron_h_omni": Case(transformers.NemotronH_Omni_Reasoning_V3, omni, omni_inputs, omni_parts),
    "qwen2_5_vl": Case(transformers.Qwen2_5_VLForConditionalGeneration, qwen25_vl, qwen_inputs, qwen_parts),
    "qwen3_vl": Case(transformers.Qwen3VLForConditionalGeneration, qwen3_vl, qwen_inputs, qwen_parts),
    "qwen3_vl_moe": Case(transformers.Qwen3VLMoeForConditionalGeneration, qwen3_vl_moe, qwen_inputs, qwen_parts),
    "qwen3_5": Case(transformers.Qwen3_5ForConditionalGeneration, qwen3_5, qwen_inputs, qwen_parts),
    "qwen3_5_moe": Case(transformers.Qwen3_5MoeForConditionalGeneration, qwen3_5_moe, qwen_inputs, qwen_parts),
    "glm4v_moe": Case(transformers.Glm4vMoeForConditionalGeneration, glm4v_moe, qwen_inputs, qwen_parts),
    "internvl": Case(transformers.InternVLForConditionalGeneration, internvl, square_inputs, square_parts),
    "llava": Case(transformers.LlavaForConditionalGeneration, llava, square_inputs, square_parts),
    "llava_onevision": Case(transformers.LlavaOnevisionForConditionalGeneration, onevision, onevision_inputs, square_parts),
}


def build(kind, config):
    return kind._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()


def ids_of(r, rows, vocabulary, special):
    """Random text around the rows of every sample's pictures, and the next tokens where neither is a placeholder."""
    plain = [token for token in range(vocabulary) if token not in special]
    samples = []
    for own in rows:
        ids = [r.choice(plain) for _ in range(r.randint(0, 4))]
        for count in own:
            ids += [special[0]] * count + [r.choice(plain) for _ in range(r.randint(1, 5))]
        samples.append(ids)
    length = max(map(len, samples)) + r.randint(4, 40)
    ids = torch.tensor([own + [r.choice(plain) for _ in range(length - len(own))] for own in samples])
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[labels == special[0]] = -100
    return ids, labels


def step(model, batch, parts=None):
    """The loss, its gradients left in the model, and the values of a step."""
    kept = {}
    hooks = parts(model, lambda name, value: kept.update({name: value.detach()})) if parts else []
    kind = next(model.parameters()).dtype
    inputs = {name: value.to(kind) if value.is_floating_point() else value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), kept | dict(logits=logits.detach())


def gradients(model, folder):
    """Every published tensor's gradient, as transformers saves them in place of the weights; layers that nothing reads have none."""
    for name, parameter in model.named_parameters():
        unread = math.nan if any(part in name for part in ("vision_tower", "video", "layer_scale")) else 0.0
        parameter.data = torch.full_like(parameter, unread) if parameter.grad is None else parameter.grad
    with tempfile.TemporaryDirectory(dir=folder) as place:
        model.save_pretrained(place)
        found = load_file(os.path.join(place, "model.safetensors"))
    norms = {name: value.double().norm().item() for name, value in found.items()}
    return {name: norm for name, norm in norms.items() if found[name].is_floating_point() and not name.endswith("correction_bias") and not math.isnan(norm)}


def published(r, written):
    """config.json in a form that published folders have."""
    text = written["text_config"]
    if "rope_parameters" in text and not (text["model_type"] == "gpt_oss" and text["rope_parameters"]["rope_type"] == "default") and r.random() < 0.4:
        older_form(text)
        if written["model_type"] == "qwen2_5_vl":
            text["rope_scaling"]["type"] = "mrope"
    if r.random() < 0.3:
        text.pop("tie_word_embeddings", None)
    elif written["model_type"] == "internvl" and r.random() < 0.5:
        del written["tie_word_embeddings"]
    if written["model_type"] == "qwen2_5_vl" and r.random() < 0.5:
        del written["text_config"], written["vision_config"]["model_type"], text["model_type"]
        written = text | written
    elif written["model_type"].startswith(("qwen", "glm")) and r.random() < 0.3:
        written["vision_config"]["model_type"] = written["model_type"]
    return written


def attempt(folder, family, r):
    """Whether gradients are well conditioned in the model drawn, as in drawn_families.py."""
    case = cases[family]
    drawn = case.draw(r)
    vocabulary, tied = drawn["text_config"]["vocab_size"], drawn["text_config"].get("tie_word_embeddings", False)
    special = r.sample(range(vocabulary), 4)
    named = "image_token_index" if family.startswith("llava") else "image_token_id"
    drawn |= {named: special[0]} | ({} if family == "nemotron_h_omni" else dict(tie_word_embeddings=tied))
    if family.startswith(("qwen", "glm")):
        named = "vision_{}_token_id" if family.startswith("qwen") else "image_{}_token_id"
        drawn |= {"video_token_id": special[1], named.format("start"): special[2], named.format("end"): special[3]}
    if family == "llava_onevision":
        drawn["video_token_index"] = special[1]
    config = lambda: case.kind.config_class(**json.loads(json.dumps(drawn)))
    model = build(case.kind, config())
    fill([model], torch.Generator().manual_seed(r.randrange(2**31)))
    for name, parameter in model.named_parameters():
        if "layer_scale" in name:
            parameter.data.fill_(1)
    model.tie_weights()
    os.makedirs(folder)
    model.save_pretrained(folder)
    weights = load_file(os.path.join(folder, "model.safetensors"))
    path = os.path.join(folder, "config.json")
    written = published(r, json.load(open(path)))
    json.dump(written, open(path, "w"), indent=2)

    rows, inputs = case.inputs(r, model.config)
    if family == "llava_onevision":
        image_processor(model.config).save_pretrained(folder)
    ids, labels = ids_of(r, rows, vocabulary, special)
    batch = dict(input_ids=ids, labels=labels, **inputs)
    if family.startswith(("qwen", "glm")):
        batch["mm_token_type_ids"] = (ids == special[0]).long()
    stored = {f"1.{name}": (value if value.is_floating_point() else value.int()).contiguous() for name, value in batch.items()}
    save_file(stored, os.path.join(folder, "batches.safetensors"))
    frozen = lambda model: [parameter.requires_grad_("layer_scale" not in name) for name, parameter in model.named_parameters()]
    frozen(model)
    step(model, batch)
    with float64():
        exact = []
        for rounding in (0, 6e-8):
            twin = build(case.kind, config()).double()
            values = dict(model.named_parameters()) | dict(model.named_buffers())
            for name, value in [*twin.named_parameters(), *twin.named_buffers()]:
                if "inv_freq" not in name and value.is_floating_point():
                    own = values[name].detach().double()
                    value.data.copy_(own + rounding * own * (2 * torch.rand_like(own) - 1))
            frozen(twin)
            made = step(twin, batch, None if rounding else case.parts)
            exact.append((*made, gradients(twin, folder)))
    (loss, kept, norms), (_, __, moved) = exact
    coarse = gradients(model, folder)
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    norms = {name: norm if norm > 1e-12 * total else 0.0 for name, norm in norms.items()}
    noise = max(abs(other[name] / norm - 1) for other in (coarse, moved) for name, norm in norms.items() if norm > 0)
    if noise > 2e-6:
        return False
    golden = dict(
        source=f"transformers {case.kind.__name__}",
        dtype="float32",
        optimizer=dict(name="AdamW", lr=1e-3, betas=[0.9, 0.95], eps=1e-6, weight_decay=0.1, no_weight_decay=[name for name in norms if weights[name].dim() < 2], clip_grad=1.0, schedule="constant"),
        exact_steps=1,
        batch=ids.shape[0],
        seq=ids.shape[1],
        steps=[dict(step=1, loss=loss, grad_norm=total, loss_band=0, grad_norm_band=0)],
        step1_probe=dict(activations={name: statistics(value) for name, value in kept.items()}, grad_norm=norms),
    )
    json.dump(golden, open(os.path.join(folder, "golden.json"), "w"), indent=1)
    print(f"{os.path.basename(folder)} {noise:.1e}", flush=True)
    return True


if __name__ == "__main__":
    seed, first, count = map(int, sys.argv[3:6])
    for family in sys.argv[2].split(","):
        for number in range(first, first + count):
            place = os.path.join(sys.argv[1], f"{family}-{seed}-{number}")
            r = random.Random(f"{family} {seed} {number}")
            while not attempt(place, family, r):
                shutil.rmtree(place)
