"""Writes tests/golden/import, which tests/data/import reads: the same samples as pictures, and as the Hugging Face package writes them.

    pip install datasets==5.2.0 pyarrow==26.0.1 pillow && python import.py
"""

import json
import os
import shutil

from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pillow
from pyarrow import parquet

here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../import")
pictures = os.path.join(here, "pictures")
shutil.rmtree(pictures, ignore_errors=True)
os.makedirs(pictures)
formats = ["png", "jpg", "webp", "gif", "bmp", "png"]
captions = [
    "a red dot",
    'a "quoted" word, and a comma',
    "two\nlines",
    "ünïcödé 图片 😀",
    "  spaces before; a <tag>",
    "the last",
]
for i, suffix in enumerate(formats):
    image = Pillow.new("RGB", (16 + i, 12), (40 * i, 255 - 40 * i, 90))
    image.save(os.path.join(pictures, f"{i}.{suffix}"))
    with open(os.path.join(pictures, f"{i}.txt"), "w") as file:
        file.write(captions[i])


def image_bytes(i):
    with open(os.path.join(pictures, f"{i}.{formats[i]}"), "rb") as file:
        return file.read()


def image(i):
    return {"bytes": image_bytes(i), "path": f"{i}.{formats[i]}"}


rows = Dataset.from_dict(
    {"image": [image(i) for i in range(6)], "caption": captions, "score": [0.5 * i for i in range(6)]},
    features=Features({"image": Image(), "caption": Value("string"), "score": Value("float64")}),
)
rows.to_parquet(os.path.join(here, "captions.parquet"), batch_size=4)
for codec in ["zstd", "gzip", "brotli", "lz4"]:
    path = os.path.join(here, f"captions.{codec}.parquet")
    parquet.write_table(rows.data.table, path, compression=codec, row_group_size=4)
rows.save_to_disk(os.path.join(here, "captions"))

talks = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>\nWhat is it?"},
        {"role": "assistant", "content": "A dot."},
        {"role": "user", "content": "And <image> this?"},
        {"role": "assistant", "content": "A word."},
    ],
    [{"role": "user", "content": "No picture?"}, {"role": "assistant", "content": "None."}],
]
talk = Dataset.from_dict(
    {"messages": talks, "images": [[image(0), image(1)], []]},
    features=Features(
        {
            "messages": [{"role": Value("string"), "content": Value("string")}],
            "images": [Image()],
        }
    ),
)
talk.to_parquet(os.path.join(here, "talk.parquet"))
DatasetDict({"train": talk, "test": talk.select([1])}).save_to_disk(os.path.join(here, "talk"))
with open(os.path.join(here, "talk.json"), "w") as file:
    json.dump(talks, file, ensure_ascii=False, indent="\t")
    file.write("\n")

classes = Dataset.from_dict(
    {"image": [image(i) for i in range(5)], "label": [2, 0, 1, -1, None]},
    features=Features({"image": Image(), "label": ClassLabel(names=["cat", "dog", "red fox"])}),
)
classes.to_parquet(os.path.join(here, "classes.parquet"))
classes.save_to_disk(os.path.join(here, "classes"))

def called(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    properties = {key: {"type": "integer"} for key in arguments}
    return {"messages": turns, "tools": [{"name": name, "parameters": {"properties": properties}}]}


# Calls of different tools, which a table gives one another's arguments.
calls = [called("one", {"a": 2**62}), called("other", {"b": 2})]
with open(os.path.join(here, "calls.jsonl"), "w") as file:
    file.writelines(json.dumps(call) + "\n" for call in calls)
calls = Dataset.from_list(calls)
calls.to_parquet(os.path.join(here, "calls.parquet"))
calls.save_to_disk(os.path.join(here, "calls"))
