#!/usr/bin/env bash
# The 20-layer model of twenty_layers.sh, both modules, or Qwen3-VL-30B-A3B with 16 of its 128 experts on one GPU (layout qwen3-vl), on real
# pictures beside mock data: JPEGs of photographs' sizes with captions, packed to 8,192 tokens by length and by equal work. Prints each run's
# steps, what of mock data's rate the pictures reach, how much steps vary, and the peak beside the plan's. Needs Python with Pillow
# and numpy. In a layout both modules have the same GPUs.
#
#   bash tests/cuda/pictures.sh MIMO FOLDER LAYOUT [STEPS [PICTURES [FLAG…]]]
set -eu
mimo=$1 folder=$2 layout=$3 steps=${4:-12} pictures=${5:-4000}
mkdir -p "$folder/set"
# shellcheck source-path=SCRIPTDIR source=twenty_layers_flags.sh
source "$(dirname "$0")/twenty_layers_flags.sh"

# Sets `arguments` to a step of Qwen3-VL-30B-A3B, four microbatches with moments in bf16 as in mimo bench.
qwen3_vl() {
	read -ra arguments <<<"--preset qwen3-30b-a3b --model-provider nemotron-moe-vlm --num-experts 16 --moe-router-force-load-balancing \
		--moe-token-dispatcher-type auto --mrope-section 24 20 20 --mrope-interleaved --rotary-base 5000000 --llm-offset 0 \
		--image-token-id 151655 --vision-num-layers 27 --vision-hidden-size 1152 --vision-num-attention-heads 16 \
		--vision-ffn-hidden-size 4304 --vision-max-img-h 768 --vision-max-img-w 768 --vision-position-mode aligned \
		--vision-final-layernorm --vision-activation gelu-tanh --vision-norm-epsilon 1e-6 --vision-patch-bias --vision-add-qkv-bias \
		--vision-temporal-patch-size 2 --vision-rotary-base 10000 --deepstack-visual-indexes 8 16 24 --class-token-len 0 \
		--vision-projection-type mlp --vision-projection-activation gelu --vision-projection-bias --vision-projection-ffn-hidden-size 4608 --patch-dim 16 \
		--pixel-shuffle --disable-vision-class-token --dynamic-resolution --min-pixels 65536 --max-pixels 16777216 \
		--seq-length 8192 --micro-batch-size 1 --global-batch-size 4 --bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 \
		--lr 3e-4 --eval-interval 1000 --log-interval 1 --log-throughput"
	arguments+=("$@")
}

[ -e "$folder/set/.nv-meta" ] || python3 - "$folder/set" "$pictures" <<'PYTHON'
import io, multiprocessing, pathlib, random, sys, tarfile

import numpy
from PIL import Image

folder, count, shard = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 250


def picture(number):
    """A JPEG of 0.33 megapixels in the median and 0.5 in the mean, about 3 bits a pixel, and a text of 5 to 400 bytes, its tokens."""
    draw = numpy.random.default_rng(number)
    pixels = min(4e6, max(3e4, 0.33e6 * numpy.exp(0.9 * draw.standard_normal())))
    ratio = numpy.exp(0.3 * draw.standard_normal())
    width, height = int((pixels * ratio) ** 0.5), int((pixels / ratio) ** 0.5)
    image = numpy.zeros((height, width, 3), numpy.float32)
    for scale, amplitude in ((64, 60), (16, 30), (4, 18), (1, 9)):
        small = draw.normal(0, amplitude, (height // scale + 2, width // scale + 2, 3)).astype(numpy.float32)
        image += numpy.repeat(numpy.repeat(small, scale, 0), scale, 1)[:height, :width]
    to = io.BytesIO()
    Image.fromarray((image + 128).clip(0, 255).astype(numpy.uint8)).save(to, "JPEG", quality=88)
    tokens = int(min(400, max(5, 40 * numpy.exp(0.9 * draw.standard_normal()))))
    return to.getvalue(), "".join(map(chr, draw.integers(32, 127, tokens)))


def write(first):
    with tarfile.open(folder / f"train-{first // shard:03}.tar", "w") as tar:
        for number in range(first, min(count, first + shard)):
            jpeg, text = picture(number)
            for suffix, data in (("jpg", jpeg), ("txt", text.encode())):
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


with multiprocessing.Pool() as pool:
    pool.map(write, range(0, count, shard), 1)
PYTHON
du -sh "$folder/set"
[ -e "$folder/set/.nv-meta" ] || "$mimo" data prepare "$folder/set" --split-parts 'train:train-.*' --sample-type CaptioningSample \
	--field-map '{"image": "jpg", "caption": "txt"}'

# measure NAME FLAG…: trains, and keeps the log and the plan.
measure() {
	local name=$1
	if [ "$layout" = qwen3-vl ]; then
		qwen3_vl --train-iters "$steps" "${@:2}"
	else
		twenty_layers "$layout" "$steps" --train-iters "$steps" "${@:2}"
	fi
	"$mimo" plan --device cuda "${arguments[@]}" >"$folder/$name.plan"
	sed -n '/Memory of a rank/,/^$/p' "$folder/$name.plan"
	"$mimo" train "${arguments[@]}" --device cuda --log-json "$folder/$name.jsonl"
}
measure mock "${@:6}"
real=(--dataset-provider energon --data-path "$folder/set" --packing-buffer-size 200 --num-workers 6 --encoder-balance cost)
measure real "${real[@]}" "${@:6}"
measure equal-work "${real[@]}" --packing-method equal-work "${@:6}"

python3 - "$folder" <<'PYTHON'
import json, statistics, sys

rates = {}
for name in ("mock", "real", "equal-work"):
    lines = [json.loads(line) for line in open(f"{sys.argv[1]}/{name}.jsonl")]
    steps = [line for line in lines if "elapsed_ms" in line][2:]
    times = [step["elapsed_ms"] for step in steps]
    rates[name] = statistics.median(sum(module["tflops_per_rank"] for module in step["modules"]) for step in steps)
    spread = statistics.pstdev(times) / statistics.mean(times)
    print(f"{name}: median {statistics.median(times):.0f} ms, least {min(times):.0f}, most {max(times):.0f}, spread {spread:.1%}, "
          f"{rates[name]:.0f} TFLOP/s; memory {json.dumps(steps[-1]['memory'])}")
for name in ("real", "equal-work"):
    print(f"{name}: {rates[name] / rates['mock']:.1%} of mock data's rate")
PYTHON
