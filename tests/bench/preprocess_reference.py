"""Lines of JSON to indexed data with megatron-core's builder and one process that encodes, as Megatron-LM's
tools/preprocess_data.py has it: preprocess_reference.py INPUT PREFIX TOKENIZER. Prints the seconds of both processes."""

import json
import multiprocessing
import resource
import sys
import time
import warnings

warnings.filterwarnings("ignore")
from megatron.core.datasets import indexed_dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

INPUT, PREFIX, TOKENIZER = sys.argv[1:]


def start():
    global tokenizer
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)


def encode(line):
    return tokenizer(json.loads(line)["text"]).input_ids


if __name__ == "__main__":
    start()
    dtype = indexed_dataset.DType.optimal_dtype(len(tokenizer))
    builder = indexed_dataset.IndexedDatasetBuilder(PREFIX + ".bin", dtype=dtype)
    began = time.process_time()
    with open(INPUT, encoding="utf-8") as lines:
        pool = multiprocessing.Pool(1, initializer=start)
        for ids in pool.imap(encode, lines, 32):
            builder.add_document(ids, [len(ids)] if ids else [])
        pool.close()
        pool.join()
    builder.finalize(PREFIX + ".idx")
    worker = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(time.process_time() - began + worker.ru_utime + worker.ru_stime)
