"""Losses of runs on the same data from the same weights, beside those of the first.

    python3 tests/bench/compare_losses.py NAME=LOG.jsonl NAME=LOG.jsonl...

A log is what mimo train --log-json wrote. Prints, for every run but the first, how far its training losses are from the first
run's, relative to these: the largest of single steps, the steps above half a percent, the largest of means of 20 steps, the mean of
all steps and that of the last quarter, and the same of every loss on held-out data, with the values themselves.
"""

import json
import sys

WINDOW = 20
BOUND = 0.005


def read(path):
    """Training losses by step, and losses on held-out data by step."""
    steps, held_out = {}, {}
    with open(path) as lines:
        for line in map(json.loads, lines):
            if line.get("split") == "validation":
                held_out[line["iteration"]] = line["lm loss"]
            elif "elapsed_ms" in line:
                steps[line["iteration"]] = line["lm loss"]
    return steps, held_out


def mean(values):
    return sum(values) / len(values)


def off(value, reference):
    return abs(value / reference - 1)


def percent(share):
    return f"{100 * share:.3f} %"


def compared(name, run, reference):
    steps, held_out = run
    first_steps, first_held_out = reference
    if steps.keys() != first_steps.keys() or held_out.keys() != first_held_out.keys():
        sys.exit(f"{name} has other steps, or held-out losses at others, than the first run.")
    own, others = ([losses[step] for step in sorted(losses)] for losses in (steps, first_steps))
    single = [off(a, b) for a, b in zip(own, others)]
    windows = range(0, len(own) - WINDOW + 1)
    smooth = [off(mean(own[at : at + WINDOW]), mean(others[at : at + WINDOW])) for at in windows]
    last = max(1, len(own) // 4)
    return [
        name,
        percent(max(single)),
        f"{sum(share > BOUND for share in single)} of {len(single)}",
        percent(max(smooth)) if smooth else "",
        percent(off(mean(own), mean(others))),
        percent(off(mean(own[-last:]), mean(others[-last:]))),
        *(percent(off(held_out[step], first_held_out[step])) for step in sorted(held_out)),
    ]


def table(rows):
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def main(arguments):
    runs = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals:
            sys.exit(f"{argument}: NAME=LOG.jsonl is expected.")
        runs[name] = read(path)
    if len(runs) < 2:
        sys.exit("Two logs at least are expected, NAME=LOG.jsonl each.")
    (first, reference), *others = runs.items()
    evaluations = sorted(reference[1])
    values = [["loss", "first step", "last 20 steps", *(f"held out, step {step}" for step in evaluations)]]
    for name, (steps, held_out) in runs.items():
        ordered = [steps[step] for step in sorted(steps)]
        rounded = [ordered[0], mean(ordered[-WINDOW:]), *(held_out[step] for step in sorted(held_out))]
        values.append([name, *(f"{value:.4f}" for value in rounded)])
    print(table(values))
    print()
    header = [f"beside {first}", "single step", f"over {percent(BOUND)}", f"mean of {WINDOW}", "mean of all", "last quarter"]
    header += [f"held out, step {step}" for step in evaluations]
    print(table([header, *(compared(name, run, reference) for name, run in others)]))


main(sys.argv[1:])
