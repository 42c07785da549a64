"""Orders of Megatron's GPTDataset and blends under random settings: reference.py FOLDER COUNT SEED > orders.json

Needs megatron-core, numpy and torch. Data sets are drawn by a generator that orders.test.ts repeats, so that only
settings and digests are kept. A digest is of all samples of a split: tokens, labels, loss mask, and positions where they are
reset, or where each token's document begins where the attention mask is.
"""

import hashlib
import json
import os
import random
import sys
import warnings

warnings.filterwarnings("ignore")
import logging  # noqa: E402

logging.disable(logging.WARNING)
import numpy  # noqa: E402
import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: E402
from megatron.core.datasets.utils import get_blend_from_list  # noqa: E402

FOLDER, COUNT = sys.argv[1], int(sys.argv[2])
draw = random.Random(int(sys.argv[3]))
VOCABULARY, END = 997, 3


class Tokenizer:
    vocab_size, eod, pad, unique_identifiers = VOCABULARY, END, -1, {}


def numbers(seed):
    """A linear congruential generator with 32 bits of state; the upper 16 are drawn."""
    state = seed
    while True:
        state = (state * 1664525 + 1013904223) % 2**32
        yield state >> 16


def write_data(prefix, seed, sequences, longest, dtype):
    drawn = numbers(seed)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, dtype))
    for index in range(sequences):
        length = next(drawn) % (longest + 1)
        builder.add_item(torch.tensor([next(drawn) % VOCABULARY for _ in range(length)], dtype=torch.int64))
        if next(drawn) % 3 == 0 or index == sequences - 1:
            builder.end_document()
    builder.finalize(prefix + ".idx")


def digest(dataset, options):
    whole = hashlib.sha256()
    for index in range(len(dataset)):
        sample = dataset[index]
        parts = [sample["tokens"], sample["labels"], sample["loss_mask"].to(torch.int64)]
        if options["reset_attention_mask"]:
            # The first key that a query sees.
            parts.append((~sample["attention_mask"][0]).to(torch.int64).argmax(dim=1))
        elif options["reset_position_ids"]:
            parts.append(torch.arange(len(sample["tokens"])) - sample["position_ids"])
        for part in parts:
            whole.update(part.numpy().astype("<i4").tobytes())
    return [len(dataset), whole.hexdigest()[:16]]


def words_of(sets, weighted):
    weights = [draw.choice([draw.random() + 0.01, draw.randint(1, 9), 0.3, 0.7]) for _ in sets]
    return [str(word) for pair in zip(weights, sets) for word in pair] if weighted else list(sets)


def random_setting(number):
    many = draw.choice([1, 1, 1, 2, 2, 3, 4, 6, 9, 17])
    sets = [
        {
            "name": f"{number}-{i}",
            "seed": draw.getrandbits(32),
            "sequences": draw.choice([1, 2, 5, 20, 60, 200]) + draw.randint(0, 9),
            "longest": draw.choice([3, 9, 30, 100]),
            "dtype": draw.choice(["uint16", "int32", "int64", "int16"]),
        }
        for i in range(many)
    ]
    names = [one["name"] for one in sets]
    weighted = draw.random() < 0.7
    sequence = draw.choice([2, 3, 8, 16, 33, 64])
    resets = draw.random() < 0.3
    blends = {"data-path": words_of(names, weighted)}
    if draw.random() < 0.3:
        parts = [draw.sample(names, draw.randint(1, many)) for _ in range(3)]
        blends = {f"{split}-data-path": words_of(part, weighted) for split, part in zip(("train", "valid", "test"), parts)}
    return {
        "sets": sets,
        **blends,
        "split": draw.choice(["969,30,1", "1,1,1", "90,5,5", "100,0,0", "99,1,0", "0.7,0.2,0.1", "80,20,0", "3,3,7"]),
        "sequence": sequence,
        "seed": draw.choice([1, 42, 1234, draw.getrandbits(31)]),
        "samples": [draw.choice([1, 7, 50, 200, 900]), draw.choice([1, 8, 40]), draw.choice([1, 5])],
        "reset_position_ids": resets and draw.random() < 0.5,
        "reset_attention_mask": resets and draw.random() < 0.5,
        "eod_mask_loss": draw.random() < 0.3,
    }


def run(setting):
    """Digest of each split; null for an empty one; the error's name where the package refuses the setting."""
    placed = lambda words: [word if is_number(word) else os.path.join(FOLDER, word) for word in words]
    blend = lambda key: get_blend_from_list(placed(setting[key]))
    splits = [f"{split}-data-path" for split in ("train", "valid", "test")]
    own = splits[0] in setting
    config = GPTDatasetConfig(
        random_seed=setting["seed"],
        sequence_length=setting["sequence"],
        blend=None if own else blend("data-path"),
        blend_per_split=[blend(key) for key in splits] if own else None,
        split=None if own else setting["split"],
        tokenizer=Tokenizer(),
        reset_position_ids=setting["reset_position_ids"],
        reset_attention_mask=setting["reset_attention_mask"],
        eod_mask_loss=setting["eod_mask_loss"],
        create_attention_mask=setting["reset_attention_mask"],
    )
    try:
        built = BlendedMegatronDatasetBuilder(GPTDataset, setting["samples"], lambda: True, config).build()
    except (AssertionError, IndexError, ValueError) as error:
        return type(error).__name__
    return [dataset and digest(dataset, setting) for dataset in built]


def write_sets(sets):
    """Digest of the files of all sets, index before data."""
    whole = hashlib.sha256()
    for one in sets:
        prefix = os.path.join(FOLDER, one["name"])
        write_data(prefix, one["seed"], one["sequences"], one["longest"], one["dtype"])
        for suffix in (".idx", ".bin"):
            with open(prefix + suffix, "rb") as file:
                whole.update(file.read())
    return whole.hexdigest()[:16]


def is_number(word):
    try:
        float(word)
    except ValueError:
        return False
    return True


def has_tokens(setting):
    """Whether every set has tokens to give to every split: Megatron looks for them without an end."""
    shares = [float(share) for share in setting["split"].split(",")]
    for one in setting["sets"]:
        drawn, lengths = numbers(one["seed"]), []
        for _ in range(one["sequences"]):
            lengths.append(next(drawn) % (one["longest"] + 1))
            for _ in range(lengths[-1] + 1):
                next(drawn)
        begin = 0.0
        bounds = []
        for share in shares:
            bounds.append((begin, begin + share / sum(shares)))
            begin += share / sum(shares)
        for first, end in [(0, 1)] if "train-data-path" in setting else bounds:
            part = lengths[round(first * len(lengths)) : round(end * len(lengths))]
            if first != end and sum(part) <= 3 * setting["sequence"]:
                return False
    return True


settings = []
while len(settings) < COUNT:
    setting = random_setting(len(settings))
    if has_tokens(setting):
        settings.append({**setting, "files": write_sets(setting["sets"]), "digests": run(setting)})
print("[\n" + ",\n".join(json.dumps(setting) for setting in settings) + "\n]")
