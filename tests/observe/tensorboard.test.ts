/** TensorBoard events: Megatron's names, read back by our reader and by TensorBoard's own loader. */
import { afterEach, expect, test } from "bun:test";
import { appendFileSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { readScalars, TensorBoard } from "../../src/observe/tensorboard.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { step } from "./step.ts";

const folders: string[] = [];
afterEach(() => {
	for (const folder of folders.splice(0)) rmSync(folder, { recursive: true });
});

function open(timers = true): { folder: string; board: TensorBoard } {
	const folder = mkdtempSync(join(tmpdir(), "mimo-tensorboard-"));
	folders.push(folder);
	const options = { interval: 1, timers, logInterval: 1, flopsPerStep: 4e12, worldSize: 2 };
	return { folder, board: new TensorBoard({ ...options, folder }) };
}

const seconds = {
	compute: 0.25,
	bridge: 0.125,
	wait: 0,
	gradients: 0.0625,
	optimizer: 0.03125,
	data: 0,
	other: 0.03125,
};
const rich = {
	modules: [{ name: "language", ranks: 2, seconds, flops: 1e12, idle: 0.25, slowest: { rank: 1, busy: 0.25 } }],
	memory: [
		{ allocated: 1024, reserved: 2048, peak: 1536 },
		{ allocated: 512, reserved: 4096, peak: 3072 },
	],
	layerLosses: { seq_load_balancing_loss: new Map([[1, 1.25]]) },
	tokensPerExpert: new Map([[1, [3, 0, 5, 8]]]),
};

test("scalars have Megatron's names over steps and samples, and can be read during the run", () => {
	const { folder, board } = open();
	board.step(step({ iteration: 1, consumedSamples: 8, losses: { "lm loss": 5.5 }, seconds: 9 }));
	// Before close: written events can be read.
	expect(readScalars(folder).get("lm loss")).toEqual(new Map([[1, 5.5]]));
	board.step(
		step({ iteration: 2, consumedSamples: 16, losses: { "lm loss": 4.5, z_loss: 0.5 }, seconds: 0.5, ...rich }),
	);
	board.evaluation({ iteration: 2, consumedSamples: 16, split: "validation", label: "", losses: { "lm loss": 2 } });
	const scalars = readScalars(folder);
	expect(scalars.get("lm loss")).toEqual(
		new Map([
			[1, 5.5],
			[2, 4.5],
		]),
	);
	expect(scalars.get("lm loss vs samples")).toEqual(
		new Map([
			[8, 5.5],
			[16, 4.5],
		]),
	);
	const at2 = Object.fromEntries(
		[...scalars].flatMap(([tag, points]) => (points.has(2) ? [[tag, points.get(2)]] : [])),
	);
	expect(at2).toMatchObject({
		"iteration-time": 0.5,
		throughput: 4,
		"language/compute-time": 0.25,
		"language/bridge-time": 0.125,
		"language/throughput": 1,
		"mem-reserved-bytes": 4096,
		"mem-allocated-bytes": 1024,
		"mem-max-allocated-bytes": 3072,
		"memory/rank_0_peak-bytes": 1536,
		"moe/seq_load_balancing_loss_layer_1": 1.25,
		"lm loss validation": 2,
	});
	expect(at2["lm loss validation ppl"]).toBeCloseTo(Math.exp(2), 5);
	for (const name of ["learning-rate", "batch-size", "loss-scale", "grad-norm"]) {
		expect([...scalars.get(name)!.keys()]).toEqual([1, 2]);
		expect([...scalars.get(`${name} vs samples`)!.keys()]).toEqual([8, 16]);
	}
	// The first step holds the start of the process.
	expect(scalars.get("iteration-time")!.has(1)).toBe(false);
	board.close();
});

test("an incomplete last record of a killed run loses only that record", () => {
	const { folder, board } = open();
	board.step(step({ iteration: 1, losses: { "lm loss": 5.5 } }));
	const file = join(folder, readdirSync(folder)[0]!);
	const record = readFileSync(file).subarray(0, 20);
	appendFileSync(file, record);
	expect(readScalars(folder).get("lm loss")).toEqual(new Map([[1, 5.5]]));
	board.close();
});

const tensorboard = referencePython("tensorboard");
test.skipIf(tensorboard === null)("TensorBoard's own loader reads scalars and histograms", async () => {
	const { folder, board } = open();
	for (let iteration = 1; iteration <= 3; iteration++) {
		board.step(step({ iteration, losses: { "lm loss": 8 / iteration }, ...rich }));
	}
	const script = `
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "histograms": 0})
events.Reload()
scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
histograms = {tag: [(e.step, e.histogram_value.num, list(e.histogram_value.bucket)) for e in events.Histograms(tag)] for tag in events.Tags()["histograms"]}
print(json.dumps({"scalars": scalars, "histograms": histograms}))
`;
	// The writer is still open: TensorBoard shows the run as it goes.
	const { scalars, histograms } = JSON.parse(await runPython(tensorboard!, ["-c", script, folder]));
	expect(scalars["lm loss"].map(([at]: [number]) => at)).toEqual([1, 2, 3]);
	expect(scalars["lm loss"][1][1]).toBe(4);
	expect(scalars["moe/seq_load_balancing_loss_layer_1"][0][1]).toBe(1.25);
	expect(histograms["moe/tokens_per_expert_layer_1"][2]).toEqual([3, 16, [3, 0, 5, 8]]);
	board.close();
});
