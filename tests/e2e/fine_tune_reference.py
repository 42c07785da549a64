"""What transformers computes with a vision-language folder that `mimo train --save-hf` wrote.

    python fine_tune_reference.py MODEL EXPECTED.json OUT.safetensors      (needs torch and transformers >= 5.23)

Of the texts and pictures of tests/golden/vision-language/expected.json, in float64 from the folder's float32 weights: the
tower's features, the language model's logits of a text, and the whole model's of a text with two pictures.
"""
import json
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

PATCH = 8


def patches(rows, columns):
    c, y, x = np.meshgrid(np.arange(3), np.arange(PATCH * rows), np.arange(PATCH * columns), indexing="ij")
    image = torch.from_numpy(((c * 7919 + y * 104729 + x * 1299709 + rows * 31) % 256) / 255.0)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073], dtype=torch.float64).view(3, 1, 1)
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711], dtype=torch.float64).view(3, 1, 1)
    cut = ((image - mean) / deviation).reshape(3, rows, PATCH, columns, PATCH).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, 3 * PATCH * PATCH)


@torch.no_grad()
def main():
    folder, expected, out = sys.argv[1:]
    with open(expected) as file:
        expected = json.load(file)
    model, loading = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    print(type(model).__name__, {key: sorted(value) for key, value in loading.items() if value})
    model = model.eval().double()
    model.set_experts_implementation("eager")
    model.vision_model.config.torch_dtype = torch.float64
    grid = torch.tensor(expected["grids"])
    pixels = torch.cat([patches(*one) for one in expected["grids"]])
    text, mixed = (torch.tensor([expected[name]]) for name in ("text_ids", "mixed_ids"))
    save_file({
        "features": model.vision_model(pixels, image_grid_hw=grid).features.float().contiguous(),
        "text_logits": model.language_model(text).logits[0].float().contiguous(),
        "mixed_logits": model(mixed, pixel_values=pixels, image_grid_hw=grid).logits[0].float().contiguous(),
    }, out)


main()
