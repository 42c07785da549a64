"""Adapters of language models in PEFT, beside the folders in which they are merged.

    python text_adapters.py FOLDER NAME=BASE...      (needs torch, transformers >= 5.23 and peft)

Loads FOLDER/NAME-adapters over BASE, and FOLDER/NAME-merged, by transformers' own class in float64, and prints as JSON by name
the warnings of the load and the largest difference of logits and the largest change that the adapters make, over the largest logit.
"""
import json
import sys
import warnings

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval().double()
    model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def compared(base, adapters, merged):
    ids = torch.randint(0, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    plain, expected = (load(folder)(ids).logits for folder in (base, merged))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(load(base), adapters).eval().double()
    scale = expected.abs().max()
    return {
        "warnings": [str(one.message) for one in caught if "adapter" in str(one.message)],
        "difference": float((adapted(ids).logits - expected).abs().max() / scale),
        "change": float((plain - expected).abs().max() / scale),
    }


folder, *models = sys.argv[1:]
pairs = (model.split("=") for model in models)
print(json.dumps({name: compared(base, f"{folder}/{name}-adapters", f"{folder}/{name}-merged") for name, base in pairs}))
