"""Random data sets, metadatasets and settings of megatron-energon."""

import io
import json
import os
import random
import subprocess
import sys
import tarfile

from PIL import Image
from tasks import TASKS

OUT, COUNT, SEED = os.path.abspath(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(SEED)


def write_tar(path, members):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def picture(i):
    file = io.BytesIO()
    Image.new("RGB", (2 + i % 3, 2), (i % 256, 0, 0)).save(file, "PNG")
    return file.getvalue()


def sentence(i):
    return " ".join(["word", str(i)] + ["and"] * draw.randrange(12))


def prepare(path, *flags):
    command = [os.path.join(os.path.dirname(sys.executable), "energon"), "prepare", "--non-interactive", *flags, path]
    subprocess.run(command, check=True, capture_output=True)


def write_set(name, typed):
    folder = f"{OUT}/datasets/{name}"
    os.makedirs(folder)
    shards = draw.randrange(3, 9)
    key = 0
    for shard in range(shards):
        members = []
        for _ in range(draw.choice([1, 3, 8, draw.randrange(1, 70)])):
            base = f"{name}{key:06d}"
            if typed:
                members += [(f"{base}.png", picture(key)), (f"{base}.txt", sentence(key).encode())]
            else:
                turns = {"conversations": [{"from": "human", "value": sentence(key)}]}
                members += [(f"{base}.json", json.dumps(turns).encode())]
            key += 1
        write_tar(f"{folder}/{name}-{shard:03d}.tar", members)
    ratio = f"{shards - 1},1,0" if draw.random() < 0.5 else "2,1,0"
    fields = ["--sample-type", "CaptioningSample", "--field-map", '{"image": "png", "caption": "txt"}']
    prepare(folder, "--split-ratio", ratio, *(fields if typed else ["--sample-type", "CrudeWebdataset"]))
    return f"../datasets/{name}"


def write_lines(name):
    os.makedirs(f"{OUT}/datasets/{name}")
    path = f"{OUT}/datasets/{name}/{name}.jsonl"
    with open(path, "w") as file:
        for i in range(draw.randrange(20, 120)):
            file.write(json.dumps({"text": sentence(i)}) + "\n")
    prepare(path)
    return f"../datasets/{name}/{name}.jsonl"


def random_range(absolute):
    if absolute:
        low = draw.randrange(0, 8)
        return [low, draw.choice(["end", low + draw.randrange(6, 30)])]
    low, high = sorted(draw.sample(range(0, 101, 5), 2))
    return [f"{low}%", f"{high}%"]


def reference(sets, inner, weight):
    """An entry of a blend; `inner`: other metadatasets that may be named."""
    nested = inner and draw.random() < 0.4
    entry = {"path": draw.choice(inner) if nested else draw.choice(sets)}
    if weight == "weight":
        entry["weight"] = draw.choice([1, 2, 5, 0.25, round(draw.uniform(0.1, 9), 3)])
    if weight == "repetitions":
        entry["repetitions"] = draw.choice([1, 1, 2, 3, 0.5, 1.5, round(draw.uniform(0.3, 2.5), 2)])
    if draw.random() < 0.4:
        entry["subset"] = {"range": random_range(not nested and draw.random() < 0.5)}
    if draw.random() < 0.3:
        entry["shuffle_over_epochs_multiplier"] = draw.choice([2, 3, None, -1])
    if draw.random() < 0.3:
        entry["subflavors"] = {"kind": draw.choice(["vqa", "text", "other"]), "n": draw.randrange(3)}
    if not nested and not entry["path"].endswith(".jsonl") and draw.random() < 0.2:
        entry["split_part"] = "val"
    return entry


def write_metadataset(name, sets, inner, how):
    def node(weight):
        if draw.random() < 0.15:
            return reference(sets, [], None)
        entries = [reference(sets, inner, weight) for _ in range(draw.randrange(2, 5))]
        return {"blend" if weight == "weight" else "blend_epochized": entries}

    splits = {"train": node(how), "val": node("weight")}
    text = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    if how == "v1":
        entries = [{"path": draw.choice(sets), "weight": draw.randrange(1, 5)} for _ in range(3)]
        part = {"datasets": entries}
        text = {"__module__": "megatron.energon", "__class__": "Metadataset", "splits": {"train": part, "val": part}}
    with open(f"{OUT}/metadatasets/{name}.yaml", "w") as file:
        # JSON is YAML.
        json.dump(text, file, indent=2)
    return f"{name}.yaml"


def write_data():
    os.makedirs(f"{OUT}/metadatasets")
    sets = [write_set(name, typed) for name, typed in [("one", True), ("two", True), ("crude", False)]]
    sets.append(write_lines("lines"))
    names = {"weight": [], "repetitions": [], "v1": []}
    for how in ("weight", "repetitions", "weight", "repetitions", "weight", "repetitions", "v1"):
        for _ in range(3):
            name = f"{how}{len(names[how])}"
            names[how].append(write_metadataset(name, sets, names[how][-3:] if how != "v1" else [], how))
    return [path.removeprefix("../") for path in sets], {how: [f"metadatasets/{n}" for n in names[how]] for how in names}


def random_settings(sets, blends):
    validation = draw.random() < 0.12
    how = draw.choice(["set", "weight", "weight", "repetitions", "repetitions", "v1"])
    dataset = draw.choice(sets if how == "set" else blends[how])
    task = draw.choice(list(TASKS))
    parameters = {
        "world_size": draw.choice([1, 1, 2, 2, 3, 4]),
        "num_workers": draw.choice([0, 1, 2, 2, 3, 4]),
        "seed_offset": draw.choice([0, 1, 1234, draw.randrange(10**6)]),
        "task_encoder": task,
    }

    def some(name, chance, values):
        if draw.random() < chance:
            parameters[name] = draw.choice(values)

    if task in ("Packing", "PackingPost"):
        packer = draw.choice(["next_fit", "first_fit_decreasing"])
        parameters["task_encoder_args"] = {"capacity": draw.choice([50, 90, 200]), "packer": packer}
        parameters["packing_buffer_size"] = draw.choice([2, 5, 9, 20, 33])
    if task == "GroupingSizes":
        pass
    elif task in ("Grouping", "EncodeBatch"):
        parameters["batch_size"] = draw.choice([2, 3, 4, 7])
    else:
        some("batch_size", 0.5, [1, 2, 3, 5, 8])
    if "batch_size" in parameters:
        some("batch_drop_last", 0.4, [True])
    if validation:
        parameters["function"] = "get_val_dataset"
        some("limit", 0.5, [3, 7, 20])
        return dataset, parameters
    some("shuffle_buffer_size", 0.5, [1, 2, 3, 7, 20, 60])
    some("max_samples_per_sequence", 0.5, [1, 2, 5, 10, 33])
    some("parallel_shard_iters", 0.5, [1, 2, 3, 5, 20])
    some("shuffle_over_epochs_multiplier", 0.35, [1, 2, 3, -1])
    some("virtual_epoch_length", 0.25, [1, 7, 20, 50])
    if how != "weight" and how != "v1":
        some("repeat", 0.35, [False])
    return dataset, parameters
