"""Random data sets and settings, run through megatron-energon: run.py FOLDER COUNT SEED

Writes a folder of reference data as tests/data/energon-reference replays it: data sets, metadatasets, orders/ and
states/. Settings that the package itself refuses are drawn again. Every loader runs in a process of its own.
"""

import base64
import gc
import json
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings

warnings.filterwarnings("ignore")
import numpy as np  # noqa: E402
import torch  # noqa: E402
from data import COUNT, OUT, draw, random_settings, write_data  # noqa: E402
from megatron.energon import (  # noqa: E402
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from tasks import TASKS, item  # noqa: E402

LOADER = ("checkpoint_every_sec", "checkpoint_every_min_n_samples", "prefetch_factor", "n_checkpoints")
OWN = ("world_size", "num_workers", "seed_offset", "task_encoder", "task_encoder_args", "function", "loader", *LOADER)


def open_loader(dataset, parameters, rank):
    config = WorkerConfig(
        rank=rank,
        world_size=parameters["world_size"],
        num_workers=parameters["num_workers"],
        seed_offset=parameters.get("seed_offset", 0),
    )
    task = TASKS[parameters["task_encoder"]](**parameters.get("task_encoder_args", {}))
    given = {name: value for name, value in parameters.items() if name not in OWN}
    given.setdefault("batch_size", None)
    if parameters.get("function") == "get_val_dataset":
        made = get_val_dataset(f"{OUT}/{dataset}", worker_config=config, task_encoder=task, **given)
    else:
        given.setdefault("shuffle_buffer_size", None)
        given.setdefault("max_samples_per_sequence", None)
        made = get_train_dataset(f"{OUT}/{dataset}", worker_config=config, task_encoder=task, **given)
    if parameters.get("loader") == "get_loader":
        return get_loader(made)
    return get_savable_loader(made, **{name: parameters[name] for name in LOADER if name in parameters})


class Reader:
    """Rows of a loader over as many passes as needed."""

    def __init__(self, loader, workers):
        self.loader, self.workers, self.pass_ = loader, workers, None

    def take(self, count):
        rows, ends, empty = [], [], 0
        while len(rows) < count and empty < 2:
            self.pass_ = self.pass_ or iter(self.loader)
            try:
                output = next(self.pass_)
            except StopIteration:
                empty += 1
                ends.append(len(rows))
                self.pass_ = None
                continue
            empty = 0
            rows.append(self.row(output))
        if empty == 2:
            raise RuntimeError("passes without outputs")
        return rows, ends

    def row(self, output):
        key = plain(output.__restore_key__)
        one = item(output)
        sources = [[shard_of(source), source.index] for source in one.sources]
        worker = key[1] % self.workers if self.workers > 1 else 0
        return [worker, one.keys, sources, key] + ([] if one.extra is None else [one.extra])


def shard_of(source):
    path = os.path.relpath(str(source.dataset_path), OUT)
    return path if path.endswith(".jsonl") else f"{path}/{source.shard_name}"


def plain(value):
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def dump(value):
    """A state as JSON."""
    if isinstance(value, torch.Tensor):
        return {"__bytes_b64__": base64.b64encode(value.numpy().tobytes()).decode(), "__type__": "torch.uint8"}
    if isinstance(value, np.ndarray):
        return {"__type__": f"ndarray:{value.dtype}", "value": value.tolist()}
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes_b64__": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, dict):
        kind = {"__type__": type(value).__name__} if type(value) is not dict else {}
        return {**kind, **{str(key): dump(one) for key, one in value.items()}}
    if isinstance(value, (list, tuple)):
        return [dump(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return {"__type__": type(value).__name__, **{name: dump(getattr(value, name)) for name in value.__dataclass_fields__}}
    if isinstance(value, np.integer):
        return int(value)
    return value


def in_process(function, *arguments):
    """The result of a call in a process of its own, which ends with all that it started."""
    ours, theirs = multiprocessing.Pipe(False)

    def call():
        os.setpgrp()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        try:
            theirs.send_bytes(pickle.dumps((True, function(*arguments))))
        except BaseException:
            theirs.send_bytes(pickle.dumps((False, traceback.format_exc())))
        while True:
            signal.pause()

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    try:
        if not ours.poll(60):
            raise RuntimeError("no answer for a minute")
        done, result = pickle.loads(ours.recv_bytes())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if not done:
        raise RuntimeError(result)
    return result


def order_of(dataset, parameters, rank, count):
    loader = open_loader(dataset, parameters, rank)
    rows, ends = Reader(loader, parameters["num_workers"]).take(count)
    return rows, ends


def worker_times():
    """Processor time of every worker process in ticks; None while one of them runs."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().split()
    times = []
    for child in children:
        with open(f"/proc/{child}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        if fields[0] == "R":
            return None
        times.append((child, fields[11], fields[12]))
    return times


def wait_for_workers():
    """Until all workers have waited for half a second."""
    before, since = None, time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.02)
        now = worker_times()
        if now is None or now != before:
            before, since = now, time.monotonic()


def saved_run(dataset, parameters, rank, before, after):
    loader = open_loader(dataset, parameters, rank)
    reader = Reader(loader, parameters["num_workers"])
    first, ends = reader.take(before)
    # Which checkpoint of a worker is saved depends on how far it has run ahead: all the way, here as in the reference data.
    if parameters["num_workers"] > 0:
        wait_for_workers()
    state = loader.save_state_rank()
    return first, ends, state, dump(state), reader.take(after)


def resumed_run(dataset, parameters, rank, state, after):
    loader = open_loader(dataset, parameters, rank)
    loader.restore_state_rank(state)
    again = dump(loader.save_state_rank())
    return again, Reader(loader, parameters["num_workers"]).take(after)


def as_key(value):
    return tuple(as_key(one) for one in value) if isinstance(value, list) else value


def restored_samples(dataset, parameters, rank, keys):
    """Single outputs by key, in order, in one process."""
    loader = open_loader(dataset, parameters, rank)
    samples = []
    for key in keys:
        try:
            output = loader.restore_sample(as_key(key))
            one = item(output)
        except Exception as error:
            samples.append({"restore_key": key, "error": type(error).__name__})
            continue
        # What draws from the process's own generators cannot be repeated.
        drawn = parameters["task_encoder"] == "Unseeded" and one.extra is not None
        extra = "not repeatable" if drawn else one.extra
        restored = {"keys": one.keys, "extra": extra}
        samples.append({"restore_key": key, "restored_key": plain(output.__restore_key__), "restored": restored})
    return samples


def number_shards(rows_of):
    """Rows whose shards are numbers, and their names."""
    names = []
    for rows in rows_of:
        for row in rows:
            for source in row[2]:
                if source[0] not in names:
                    names.append(source[0])
                source[0] = names.index(source[0])
    return names


def write(folder, name, content):
    os.makedirs(f"{OUT}/{folder}", exist_ok=True)
    with open(f"{OUT}/{folder}/{name}.json", "w") as file:
        json.dump({"name": name, **content}, file)


def some_ranks(parameters):
    return sorted(draw.sample(range(parameters["world_size"]), min(2, parameters["world_size"])))


def make_order(name, dataset, parameters):
    count = draw.choice([40, 90, 160])
    ranks, all_rows = [], []
    for rank in some_ranks(parameters):
        rows, ends = in_process(order_of, dataset, parameters, rank, count)
        if not rows:
            raise RuntimeError("no outputs")
        all_rows.append(rows)
        ranks.append({"rank": rank, "outputs": rows, "epoch_ends": ends})
    shards = number_shards(all_rows)
    write("orders", name, {"dataset": dataset, "parameters": parameters, "shards": shards, "ranks": ranks})


def make_state(name, dataset, parameters):
    before, after = draw.choice([0, 1, 2, 5, 13, 29, 61, 120]), 40
    if draw.random() < 0.7:
        parameters |= {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 1}
    changed = {}
    if parameters["num_workers"] > 0 and parameters.get("batch_size") in (2, 8) and draw.random() < 0.5:
        changed = {"batch_size": parameters["batch_size"] // 2}
    ranks, all_rows = [], []
    for rank in some_ranks(parameters):
        first, ends, state, dumped, (rest, rest_ends) = in_process(saved_run, dataset, parameters, rank, before, after)
        again, (rows, row_ends) = in_process(resumed_run, dataset, parameters | changed, rank, state, after)
        one = {
            "rank": rank,
            "state": dumped,
            "state_saved_right_after_restore_is_equal": again == dumped,
            "before": first,
            "epoch_ends_before": ends,
            "next": rows,
            "epoch_ends_next": row_ends,
        }
        if draw.random() < 0.5:
            keys = [row[3] for row in draw.sample(first + rows, min(5, len(first + rows)))]
            one["restore_sample"] = in_process(restored_samples, dataset, parameters, rank, keys)
        if (rows, row_ends) != (rest, rest_ends):
            one |= {"uninterrupted_next": rest, "epoch_ends_uninterrupted_next": rest_ends}
        all_rows += [first, rows] + ([rest] if "uninterrupted_next" in one else [])
        ranks.append(one)
    shards = number_shards(all_rows)
    write("states", name, {"dataset": dataset, "parameters": parameters, "restore_parameters": changed or "same",
                           "outputs_before_save": before, "shards": shards, "ranks": ranks})  # fmt: skip


def main():
    torch.set_num_threads(1)
    # The package collects garbage every ten outputs, which with PyTorch loaded takes most of the time.
    gc.collect = lambda *_: 0
    os.makedirs(f"{OUT}/orders")
    sets, blends = write_data()
    made = refused = 0
    while made < COUNT:
        dataset, parameters = random_settings(sets, blends)
        kind, make = ("order", make_order) if made % 5 < 3 else ("state", make_state)
        name = f"{kind}{made:03d}_{parameters['task_encoder'].lower()}_w{parameters['world_size']}n{parameters['num_workers']}"
        try:
            make(name, dataset, parameters)
            made += 1
        except RuntimeError as error:
            refused += 1
            if os.environ.get("VERBOSE"):
                print(f"refused: {dataset} {parameters}: {str(error).strip().splitlines()[-1]}", flush=True)
    print(f"{made} runs of megatron-energon in {OUT}; {refused} settings were refused by it")


if __name__ == "__main__":
    main()
