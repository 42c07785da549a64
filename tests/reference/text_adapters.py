"""Adapters of language models in PEFT, beside the folders in which they are merged.

    python text_adapters.py FOLDER IDS NAME=BASE...      (needs numpy, torch, transformers >= 5.23 and peft)

Loads FOLDER/NAME-adapters over BASE, and FOLDER/NAME-merged, by transformers' own class in float64, and prints as JSON by name
the warnings of the load and, over the largest logit of the ids (between commas), the largest difference of both's logits, of the second's
and those of FOLDER/NAME-logits (float32), and the largest change that the adapters make.
"""
import json
import sys
import warnings

import numpy
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval().double()
    model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def compared(ids, base, adapters, merged, logits):
    plain, expected = (load(folder)(ids, use_cache=False).logits for folder in (base, merged))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(load(base), adapters).eval().double()
    own = torch.from_numpy(numpy.fromfile(logits, "<f4")).reshape(expected.shape)
    scale = expected.abs().max()
    return {
        "warnings": [str(one.message) for one in caught if "adapter" in str(one.message)],
        "difference": float((adapted(ids, use_cache=False).logits - expected).abs().max() / scale),
        "own": float((own - expected).abs().max() / scale),
        "change": float((plain - expected).abs().max() / scale),
    }


folder, ids, *models = sys.argv[1:]
ids = torch.tensor([[int(word) for word in ids.split(",")]])
pairs = (model.split("=") for model in models)
files = ("adapters", "merged", "logits")
print(json.dumps({name: compared(ids, base, *(f"{folder}/{name}-{file}" for file in files)) for name, base in pairs}))
