"""Draws the pictures that docs/fine-tune.md trains on, and writes them in the forms that data come in:

    pip install datasets==5.2.0 pyarrow==26.0.1 pillow==13.0.0 && python make_data.py

pictures.tar.gz   pictures/: pictures, each with its question and answer in a .json beside it; held-out/: others, and
                  held-out.jsonl, questions about them with their answers
shapes.csv        a table: image, question, answer
shapes.json       LLaVA: a list of records with `image` and `conversations`
shapes.parquet    a data set of Hugging Face, as to_parquet writes it
saved/            the same, as save_to_disk writes it
"""
import gzip
import io
import json
import os
import random
import shutil
import tarfile

from datasets import Dataset, Features, Image, Value
from PIL import Image as Pillow
from PIL import ImageDraw

here = os.path.dirname(os.path.abspath(__file__))
colours = {
    "red": (214, 40, 40), "green": (46, 160, 67), "blue": (37, 99, 235),
    "yellow": (240, 200, 30), "purple": (140, 60, 180), "black": (25, 25, 25),
}
shapes = ["circle", "frame", "triangle", "cross"]
SIDE, TRAINED, HELD_OUT = 32, 300, 60
QUESTION = "What is it?"


def picture(number):
    """A shape on a light ground: PNG and what it shows. It follows from the number."""
    draw_from = random.Random(number)
    colour, shape = draw_from.choice(list(colours)), draw_from.choice(shapes)
    ground = draw_from.randint(225, 255)
    image = Pillow.new("RGB", (SIDE, SIDE), (ground,) * 3)
    pen = ImageDraw.Draw(image)
    size = draw_from.randint(23, 28)
    x, y = (draw_from.randint(1, SIDE - size - 1) for _ in range(2))
    ink = tuple(min(255, max(0, value + draw_from.randint(-15, 15))) for value in colours[colour])
    right, bottom, third = x + size, y + size, size // 3
    if shape == "circle":
        pen.ellipse((x, y, right, bottom), fill=ink)
    elif shape == "frame":
        pen.rectangle((x, y, right, bottom), outline=ink, width=4)
    elif shape == "triangle":
        pen.polygon([(x, bottom), (right, bottom), (x + size // 2, y)], fill=ink)
    else:
        pen.rectangle((x + third, y, right - third, bottom), fill=ink)
        pen.rectangle((x, y + third, right, bottom - third), fill=ink)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue(), f"a {colour} {shape}"


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def write(name, text):
    with open(os.path.join(here, name), "w", newline="") as file:
        file.write(text)


names = [f"{number:03d}" for number in range(TRAINED + HELD_OUT)]
drawn = [picture(number) for number in range(TRAINED + HELD_OUT)]
trained = list(zip(names, drawn))[:TRAINED]
held_out = list(zip(names, drawn))[TRAINED:]

packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
    def add(path, content):
        member = tarfile.TarInfo(path)
        member.size, member.mtime = len(content), 1_700_000_000
        archive.addfile(member, io.BytesIO(content))

    for name, (png, answer) in trained:
        add(f"pictures/{name}.png", png)
        add(f"pictures/{name}.json", json.dumps({"question": QUESTION, "answer": answer}).encode())
    for name, (png, _) in held_out:
        add(f"held-out/{name}.png", png)
    add("held-out.jsonl", lines(
        {"image": f"held-out/{name}.png", "prompt": QUESTION, "answer": answer} for name, (_, answer) in held_out
    ).encode())
with open(os.path.join(here, "pictures.tar.gz"), "wb") as file:
    file.write(gzip.compress(packed.getvalue(), 9, mtime=0))

write("shapes.csv", "image,question,answer\n" + "".join(
    f"{name}.png,{QUESTION},{answer}\n" for name, (_, answer) in trained))
write("shapes.json", "[\n" + ",\n".join(
    json.dumps({"id": name, "image": f"{name}.png", "conversations": [
        {"from": "human", "value": QUESTION}, {"from": "gpt", "value": answer}]})
    for name, (_, answer) in trained) + "\n]\n")

rows = Dataset.from_dict(
    {
        "image": [{"bytes": png, "path": f"{name}.png"} for name, (png, _) in trained],
        "question": [QUESTION] * TRAINED,
        "answer": [answer for _, (_, answer) in trained],
    },
    features=Features({"image": Image(), "question": Value("string"), "answer": Value("string")}),
)
rows.to_parquet(os.path.join(here, "shapes.parquet"))
shutil.rmtree(os.path.join(here, "saved"), ignore_errors=True)
rows.save_to_disk(os.path.join(here, "saved"))
