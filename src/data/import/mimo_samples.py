"""Makes InterleavedSamples of the samples that `mimo data import` wrote, for Energon: texts and images in their order.

A turn of a conversation begins with its role. dataset.yaml names these functions. mimo reads the parts of the samples without
this file, and so do cookers: of crude samples, as crude.yaml gives them.
"""

import json


def part_filter(part):
    return True


def text_of(turn):
    calls = json.dumps(turn["tool_calls"]) if "tool_calls" in turn else ""
    return turn.get("content") or calls


def sample_loader(sample):
    record = sample["json"]
    if "texts" in record:
        return {"sequence": [sample[image] if text is None else text for text, image in zip(record["texts"], record["images"])]}
    if "messages" in record:
        turns = [f"{turn['role']}: {text_of(turn)}" for turn in record["messages"]]
    else:
        turns = [record.get("text", record.get("caption"))]
    names = [part for part in sample if part != "json" and not part.startswith("__")]
    images = [sample[name] for name in sorted(names, key=lambda name: int(name.split(".")[0]) if "." in name else 0)]
    # Images without tags stand before the text.
    sequence = [] if any("<image>" in turn for turn in turns) else images
    left = iter(images)
    for turn in turns:
        first, *others = turn.split("<image>")
        sequence.append(first)
        for text in others:
            sequence += [next(left), text]
    return {"sequence": [part for part in sequence if not (isinstance(part, str) and part == "")]}
