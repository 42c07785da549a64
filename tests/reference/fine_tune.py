"""What transformers computes with a vision-language folder that `mimo train --save-hf` wrote.

    python fine_tune.py MODEL EXPECTED.json OUT.safetensors      (needs torch and transformers >= 5.23)

Of the texts and pictures of tests/golden/vision-language/expected.json, in float64 from the folder's float32 weights: the
tower's features, the language model's logits of a text, and the whole model's of a text with two pictures.
"""
import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from patches import patches


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
