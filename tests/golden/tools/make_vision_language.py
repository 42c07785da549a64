"""Makes examples/shapes/{language,tower} and tests/golden/vision-language with transformers: a tiny NemotronH, a tiny RADIO
and what joins them.

    python make_vision_language.py PARTS TARGET      (needs torch, transformers >= 5.23, tokenizers, numpy and safetensors)

PARTS/language    NemotronHForCausalLM with a byte tokenizer, as save_pretrained writes them
PARTS/tower       RadioModel and its image processor, as save_pretrained writes them
TARGET/projector.safetensors   the projector between them, under its published names
TARGET/expected.safetensors   what transformers computes in float64 from the float32 weights, rounded to float32: the tower's
                  features of two images, the projector's rows, the language model's logits of a text, and those of
                  NemotronH_Omni_Reasoning_V3, made of the three, of a text with both images
TARGET/expected.json   the ids of both texts, the images in words, and of the whole model's folder as save_pretrained writes
                  it config.json and name, shape, dtype and SHA-256 of every tensor
"""
import argparse
import hashlib
import json
import os
import shutil
import tempfile

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedTokenizerFast,
    RadioConfig,
    RadioModel,
)
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "<img>", "</img>"]
PATCH, IMAGE_TOKEN = 8, 5
# Rows and columns of patches: one wider than high, one square.
GRIDS = [(2, 4), (4, 4)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer():
    """Bytes and eight special tokens before them, <image> among them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="<|im_end|>", pad_token="<unk>",
        chat_template=TEMPLATE,
    )


def language():
    return NemotronHForCausalLM(NemotronHConfig(
        vocab_size=len(SPECIAL) + 256, hidden_size=64, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=1024,
        mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=16, chunk_size=16, conv_kernel=4, expand=1,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=48,
        routed_scaling_factor=2.5, initializer_range=0.05, bos_token_id=1, eos_token_id=4, pad_token_id=0,
    ))


def tower():
    return RadioModel(RadioConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2.0, patch_size=PATCH, max_img_size=64,
        image_size=32, num_cls_tokens=1, num_registers=3, summary_idxs=[0], initializer_range=0.1,
    ))


def vary(model, seed):
    """Every float parameter gets values that no two tensors share; norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "layer_scale" in name or "A_log" in name or "dt_bias" in name:
            continue
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        elif "position" in name or "cls" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


def picture(rows, columns):
    """float32 [3, 8 rows, 8 columns] in [0, 1], from an integer hash of the place."""
    c, y, x = np.meshgrid(np.arange(3), np.arange(PATCH * rows), np.arange(PATCH * columns), indexing="ij")
    return torch.from_numpy((((c * 7919 + y * 104729 + x * 1299709 + rows * 31) % 256) / 255.0).astype(np.float32))


def patches(image):
    _, height, width = image.shape
    cut = image.reshape(3, height // PATCH, PATCH, width // PATCH, PATCH).permute(1, 3, 0, 2, 4)
    return cut.reshape(-1, 3 * PATCH * PATCH)


def whole_model(language_model, vision_model, folder):
    """The three joined by transformers' own class, saved into `folder`."""
    config = NemotronH_Omni_Reasoning_V3_Config(
        text_config=language_model.config.to_dict(),
        vision_config={**vision_model.config.to_dict(), "video_temporal_patch_size": 2},
        projector_hidden_size=96, vision_hidden_size=32, downsample_ratio=0.5, image_token_id=IMAGE_TOKEN,
    )
    model = NemotronH_Omni_Reasoning_V3(config).eval()
    model.language_model.load_state_dict(language_model.state_dict())
    own = {k: v for k, v in vision_model.state_dict().items() if not k.startswith("input_conditioner.")}
    # Two frames of one picture look as the picture does.
    own["embeddings.video_patch_projection.weight"] = torch.cat([own["embeddings.patch_projection.weight"]] * 2, 1) / 2
    model.vision_model.load_state_dict(own)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.multi_modal_projector.named_parameters():
        scale, centre = (0.1, 1.0) if name.startswith("layer_norm") else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.data = centre + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model


def listing(folder):
    """[shape, dtype, SHA-256] of every tensor of a folder."""
    found = {}
    with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
        for name in sorted(file.keys()):
            value = file.get_tensor(name)
            digest = hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            found[name] = [list(value.shape), str(value.dtype).removeprefix("torch."), digest]
    return found



@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts")
    parser.add_argument("target")
    arguments = parser.parse_args()
    parts, target = arguments.parts, arguments.target
    for folder in [f"{parts}/language", f"{parts}/tower", target]:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    torch.manual_seed(1)
    language_model, vision_model = language().eval(), tower().eval()
    vary(language_model, 4)
    vary(vision_model, 5)
    language_model.save_pretrained(f"{parts}/language")
    tokenizer().save_pretrained(f"{parts}/language")
    vision_model.save_pretrained(f"{parts}/tower")
    preprocessor = {"image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", "patch_size": PATCH,
                    "downsample_ratio": 0.5, "min_num_patches": 4, "max_num_patches": 16, "max_model_len": 64}
    with open(f"{parts}/tower/preprocessor_config.json", "w") as file:
        json.dump(preprocessor, file, indent=2)
        file.write("\n")
    with tempfile.TemporaryDirectory() as whole:
        model = whole_model(language_model, vision_model, whole)
        saved = load_file(os.path.join(whole, "model.safetensors"))
        tensors = listing(whole)
        with open(os.path.join(whole, "config.json")) as file:
            config = json.load(file)
    save_file({k: v for k, v in saved.items() if k.startswith(("mlp1.", "multi_modal_projector."))},
              f"{target}/projector.safetensors", metadata={"format": "pt"})

    images = [picture(*grid) for grid in GRIDS]
    grid = torch.tensor(GRIDS)
    mean, deviation = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1)
                       for x in (vision_model.config.norm_mean, vision_model.config.norm_std))
    pixels = torch.cat([patches((image.double() - mean) / deviation) for image in images])
    model = model.double()
    model.set_experts_implementation("eager")
    # The input conditioner is external to the whole model; nothing rounds to float32 in it.
    model.vision_model.config.torch_dtype = torch.float64
    text = [8 + value for value in b"A tiny picture of two things."]
    rows = [rows * columns // 4 for rows, columns in GRIDS]
    mixed = [1] + [IMAGE_TOKEN] * rows[0] + text[:9] + [IMAGE_TOKEN] * rows[1] + text[9:]
    vision = model.vision_model(pixels, image_grid_hw=grid)
    projected = model.get_image_features(pixels, grid, return_dict=True)
    save_file({
        "features": vision.features.float().contiguous(),
        "rows": torch.cat(list(projected.pooler_output)).float().contiguous(),
        "text_logits": model.language_model(torch.tensor([text])).logits[0].float().contiguous(),
        "mixed_logits": model(torch.tensor([mixed]), pixel_values=pixels, image_grid_hw=grid).logits[0].float().contiguous(),
    }, f"{target}/expected.safetensors", metadata={"format": "pt"})
    expected = {
        "made_by": "tests/golden/tools/make_vision_language.py",
        "image": "pixel (c, y, x) = ((7919 c + 104729 y + 1299709 x + 31 rows) mod 256) / 255",
        "grids": GRIDS,
        "text_ids": text,
        "mixed_ids": mixed,
        "whole_config": config,
        "whole_tensors": tensors,
    }
    with open(f"{target}/expected.json", "w") as file:
        json.dump(expected, file, separators=(",", ":"))
        file.write("\n")


main()
