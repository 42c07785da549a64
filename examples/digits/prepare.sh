#!/usr/bin/env bash
# Writes the data of `npm start` into runs/digits, unless it is there: pictures of handwritten digits as a prepared Energon
# data set. MIMO names another executable than dist/mimo.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=runs/digits
if [ -e "$folder/.nv-meta/split.yaml" ]; then exit 0; fi
rm -rf "$folder"
node_modules/.bin/bun examples/digits/write-shards.ts "$folder"
"${MIMO:-dist/mimo}" data prepare "$folder" --split-parts 'train:train-.*' --split-parts 'val:heldout-.*' \
  --sample-type CaptioningSample --field-map '{"image": "png", "caption": "txt"}'
