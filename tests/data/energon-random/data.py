"""Random data sets, metadatasets and settings of megatron-energon."""

import glob
import io
import json
import multiprocessing
import os
import random
import re
import sys
import tarfile

from megatron.energon.cli.main import main as energon
from PIL import Image
from tasks import PACKING, TASKS

OUT, COUNT, SEED = os.path.abspath(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(SEED)
#: Share of samples that cannot be decoded or lack a part; none in most runs.
DAMAGED = draw.choice([0, 0, 0.05])


def write_json(path, content):
    """JSON is YAML."""
    with open(path, "w") as file:
        json.dump(content, file, indent=2)


def write_tar(path, members):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    longest = max(len(name) for name, _ in members)
    formats = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT] + ([tarfile.USTAR_FORMAT] if longest < 100 else [])
    with tarfile.open(path, "w", format=draw.choice(formats)) as tar:
        if draw.random() < 0.3:
            tar.addfile(tarfile.TarInfo("__meta__/about.txt"))
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
    """`energon prepare`, in a process of its own."""

    def call():
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        energon(["prepare", "--non-interactive", "--num-workers", "1", *flags, path])

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"energon prepare {path} ended with {process.exitcode}")


def members_of(base, i, typed):
    """Files of a sample. A damaged one lacks its text, or has one that cannot be decoded."""
    if typed:
        name, text = f"{base}.txt", sentence(i).encode()
    else:
        name, text = f"{base}.json", json.dumps({"conversations": [{"from": "human", "value": sentence(i)}]}).encode()
    # Preparing reads the first two samples.
    if i > 1 and draw.random() < DAMAGED:
        text = draw.choice([b"{", b"\xff\xfe", None])
    members = [(f"{base}.png", picture(i))]
    return members if text is None else members + [(name, text)]


def write_set(name, typed, keys=None):
    """A prepared folder; its keys are its own, or those given."""
    folder, inside = f"{OUT}/datasets/{name}", draw.choice(["", "", "sub/"])
    style = draw.choice(["{}", "{}", "in/{}", "{}" + "-long" * 30])
    shards, total, key, names = draw.randrange(3, 9), 0, 0, []
    while key < len(keys) if keys else len(names) < shards:
        members = []
        for _ in range(draw.choice([1, 3, 8, draw.randrange(1, 70)])):
            if keys and key == len(keys):
                break
            base = keys[key] if keys else style.format(f"{name}{key:06d}")
            members += members_of(base, key, typed)
            key += 1
        names.append(f"{inside}{name}-{len(names):03d}.tar")
        write_tar(f"{folder}/{names[-1]}", members)
    ratio = f"{max(1, len(names) - 1)},1,0" if draw.random() < 0.5 else "2,1,0"
    fields = ["--sample-type", "CaptioningSample", "--field-map", '{"image": "png", "caption": "txt"}']
    prepare(folder, "--split-ratio", ratio, *(fields if typed else ["--sample-type", "CrudeWebdataset"]))
    write_variants(folder, names, typed)
    return f"../datasets/{name}"


def samples_of(folder, shard):
    with tarfile.open(f"{folder}/{shard}") as tar:
        names = [re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", one.name) for one in tar]
    return [name[1] for name in names if name and not name[1].startswith("__")]


def write_variants(folder, names, typed):
    """Other splits and configurations beside those that were prepared."""
    shuffled = draw.sample(names, len(names))
    border = draw.randrange(1, len(names)) if len(names) > 1 else 1
    ranges = re.sub(r"-000[.]tar$", f"-{{000..{len(names) - 1:03d}}}.tar", names[0]) if len(names) > 1 else names[0]
    one = draw.choice(names)
    several = [f"{shard}/{draw.choice(samples_of(folder, shard))}" for shard in draw.sample(names, min(3, len(names)))]
    cut = [draw.choice(names)] if len(names) > 2 and border > 1 and draw.random() < 0.5 else []
    meta = f"{folder}/.nv-meta"
    splits = {
        # Excluded: several samples and maybe a shard; one sample; nothing, with all shards in both parts.
        "cut": ({"train": shuffled[:border], "val": shuffled[border:] or shuffled}, several + cut),
        "less": ({"train": [ranges], "val": shuffled}, [f"{one}/{draw.choice(samples_of(folder, one))}"]),
        "whole": ({"train": [ranges], "val": [ranges]}, []),
    }
    for name, (parts, exclude) in splits.items():
        write_json(f"{meta}/{name}.yaml", {"split_parts": parts, "exclude": exclude})
    own = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    if typed:
        own = {
            "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
            "field_map": {"image": "png", "caption": "txt"},
        }
    own["max_samples_per_sequence"] = draw.choice([None, 2, 9])
    own["parallel_shard_iters"] = draw.choice([1, 4])
    own["subflavors"] = {"kind": draw.choice(["vqa", "own"]), "own": True}
    write_json(f"{meta}/limits.yaml", own)


def write_lines(name):
    os.makedirs(f"{OUT}/datasets/{name}")
    path = f"{OUT}/datasets/{name}/{name}.jsonl"
    with open(path, "w") as file:
        for i in range(draw.randrange(20, 120)):
            damaged = draw.random() < DAMAGED
            file.write("{no json}\n" if damaged else json.dumps({"text": sentence(i)}) + draw.choice(["\n", "\n", "\n\n"]))
    prepare(path)
    return f"../datasets/{name}/{name}.jsonl"


def write_joined():
    """Sets with common keys: the first has some, the second all, the third not all of them, in other orders."""
    keys = [f"{draw.choice(['a', 'b/c'])}{i:05d}" for i in range(draw.randrange(30, 200))]
    some = draw.sample(keys, draw.randrange(len(keys) // 2, len(keys)))
    return [
        write_set("left", True, draw.sample(keys, draw.randrange(20, len(keys)))),
        write_set("right", True, draw.sample(keys, len(keys))),
        write_set("third", True, some),
    ]


def random_range(absolute):
    if absolute:
        low = draw.randrange(0, 8)
        return [low, draw.choice(["end", low + draw.randrange(6, 30)])]
    low, high = sorted(draw.sample(range(0, 101, 5), 2))
    return [f"{low}%", f"{high}%"]


def random_join(joined):
    left, right, third = ({"path": path} for path in joined)
    left["split_config"] = draw.choice(["split.yaml", "less.yaml"])
    for other in (right, third):
        other["split_config"] = "whole.yaml"
        if draw.random() < 0.5:
            other["nonmatch"] = "skip"
    third["nonmatch"] = "skip"
    if draw.random() < 0.3:
        draw.choice([left, right])["subflavors"] = {"kind": "text"}
    if draw.random() < 0.2:
        draw.choice([left, right])["dataset_config"] = "limits.yaml"
    joiner = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
    return {"join": [left, right] + ([third] if draw.random() < 0.5 else []), "joiner": joiner}


def reference(sets, joined, inner, weight):
    """An entry of a blend, or a node; `inner`: other metadatasets that may be named."""
    nested = inner and draw.random() < 0.4
    join = not nested and draw.random() < 0.25
    if join:
        entry = random_join(joined)
    else:
        entry = {"path": draw.choice(inner) if nested else draw.choice(sets)}
    lines = not join and entry["path"].endswith(".jsonl")
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
    if not nested and not lines and draw.random() < 0.2:
        entry["split_part"] = "val"
    if not nested and not lines and not join:
        if draw.random() < 0.2:
            entry["split_config"] = draw.choice(["cut.yaml", "less.yaml"])
        if draw.random() < 0.2:
            entry["dataset_config"] = "limits.yaml"
    return entry


def write_metadataset(name, sets, joined, inner, how):
    def node(weight):
        if draw.random() < 0.2:
            return reference(sets, joined, [], None)
        entries = [reference(sets, joined, inner, weight) for _ in range(draw.randrange(2, 5))]
        blend = {"blend" if weight == "weight" else "blend_epochized": entries}
        if draw.random() < 0.15:
            blend["subset"] = {"range": random_range(False)}
        return blend

    path = f"{OUT}/metadatasets/{name}.yaml"
    splits = {"train": node(how), "val": node("weight")}
    text = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    if how == "v1":
        entries = [{"path": draw.choice(sets), "weight": draw.randrange(1, 5)} for _ in range(3)]
        part = {"datasets": entries}
        text = {"__module__": "megatron.energon", "__class__": "Metadataset", "splits": {"train": part, "val": part}}
    write_json(path, text)
    prepare_joins(path)
    return f"{name}.yaml"


def prepare_joins(path):
    """`energon prepare METADATASET`, which removes what other metadatasets need: that is put back."""
    before = {index: open(index, "rb").read() for index in glob.glob(f"{OUT}/metadatasets/*.cache/*")}
    try:
        prepare(path)
    except RuntimeError:
        # A metadataset that is refused here is refused again when it is read.
        pass
    for index, content in before.items():
        if not os.path.exists(index):
            with open(index, "wb") as file:
                file.write(content)


def write_data():
    os.makedirs(f"{OUT}/metadatasets")
    sets = [write_set(name, typed) for name, typed in [("one", True), ("two", True), ("crude", False)]]
    sets.append(write_lines("lines"))
    joined = write_joined()
    names = {"weight": [], "repetitions": [], "v1": []}
    for how in ("weight", "repetitions", "weight", "repetitions", "weight", "repetitions", "v1"):
        for _ in range(3):
            name = f"{how}{len(names[how])}"
            inner = names[how][-3:] if how != "v1" else []
            names[how].append(write_metadataset(name, sets, joined, inner, how))
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

    if task in PACKING:
        packer = draw.choice(["next_fit", "first_fit_decreasing"])
        parameters["task_encoder_args"] = {"capacity": draw.choice([50, 90, 200]), "packer": packer}
        parameters["packing_buffer_size"] = draw.choice([2, 5, 9, 20, 33])
    if "Batch" in task:
        parameters["batch_size"] = draw.choice([2, 3, 4, 7])
    else:
        some("batch_size", 0.5, [1, 2, 3, 5, 8])
    if "batch_size" in parameters:
        some("batch_drop_last", 0.4, [True])
    if how == "set" and not dataset.endswith(".jsonl"):
        some("split_config", 0.4, ["cut.yaml", "less.yaml"])
        some("dataset_config", 0.3, ["limits.yaml"])
    some("loader", 0.1, ["get_loader"])
    if validation:
        parameters["function"] = "get_val_dataset"
        some("limit", 0.5, [3, 7, 20])
        return dataset, parameters
    some("shuffle_buffer_size", 0.5, [1, 2, 3, 7, 20, 60])
    some("max_samples_per_sequence", 0.5, [1, 2, 5, 10, 33])
    some("parallel_shard_iters", 0.5, [1, 2, 3, 5, 20])
    some("shuffle_over_epochs_multiplier", 0.35, [1, 2, 3, -1])
    some("virtual_epoch_length", 0.25, [1, 7, 20, 50])
    some("split_part", 0.1, ["val"])
    if how != "weight" and how != "v1":
        some("repeat", 0.35, [False])
    return dataset, parameters
