"""Adapters of a whole model in PEFT, beside the folder in which they are merged.

    python adapters.py BASE ADAPTERS MERGED TEXTS.json      (needs torch, transformers >= 5.23 and peft)

Loads ADAPTERS over BASE and MERGED by transformers' own class, in float64, and prints as JSON the warnings of the load and, of the
text with pictures in TEXTS.json, the largest difference of logits and the largest change that the adapters make, over the largest logit.
"""
import json
import sys
import warnings

import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from patches import patches


def load(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model = model.eval().double()
    model.set_experts_implementation("eager")
    model.vision_model.config.torch_dtype = torch.float64
    return model


@torch.no_grad()
def main():
    base, adapters, merged, texts = sys.argv[1:]
    with open(texts) as file:
        texts = json.load(file)
    pixels = torch.cat([patches(*one) for one in texts["grids"]])
    inputs = {"pixel_values": pixels, "image_grid_hw": torch.tensor(texts["grids"])}
    ids = torch.tensor([texts["mixed_ids"]])
    plain = load(base)(ids, **inputs).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(load(base), adapters).eval().double()
    said = [str(one.message) for one in caught if "adapter" in str(one.message)]
    logits, expected = adapted(ids, **inputs).logits, load(merged)(ids, **inputs).logits
    scale = expected.abs().max()
    print(json.dumps({
        "warnings": said,
        "difference": float((logits - expected).abs().max() / scale),
        "change": float((plain - expected).abs().max() / scale),
    }))


main()
