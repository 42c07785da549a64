/** Attention, the state space scan and the whole training step against PyTorch on as many threads. */

import { join } from "node:path";
import { openHuggingFaceModel } from "../../src/checkpoint/hf/model.ts";
import { loadModel } from "../../src/checkpoint/model-store.ts";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import { nextTokenMicrobatch } from "../../src/data/microbatch.ts";
import { HybridModel } from "../../src/models/hybrid/model.ts";
import type { Device } from "../../src/native/device.ts";
import { AdamW } from "../../src/optim/adamw.ts";
import { StepScalars } from "../../src/optim/step-scalars.ts";
import { onlyReplica } from "../../src/parallel/data-parallel.ts";
import { readLanguageGolden } from "../../src/parity/language-golden.ts";
import { huggingFaceConfig } from "../../src/parity/language-model.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { attention } from "../../src/tensor/ops/attention.ts";
import { ssdScan } from "../../src/tensor/ops/ssd.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { singleProcess, trainStep } from "../../src/train/step.ts";
import { golden } from "../golden.ts";
import { randomValues } from "../support.ts";
import { measure, type Row, row } from "./measure.ts";

const attentionSizes = [
	{ batch: 4, length: 256, queries: 4, keys: 2, width: 32 },
	{ batch: 1, length: 1024, queries: 16, keys: 4, width: 64 },
	{ batch: 1, length: 2048, queries: 8, keys: 2, width: 128 },
] as const;
const scanSizes = [
	{ batch: 4, length: 256, heads: 8, width: 32, groups: 2, state: 32, chunk: 64 },
	{ batch: 1, length: 1024, heads: 16, width: 64, groups: 4, state: 128, chunk: 128 },
] as const;
const trainedFolders = ["hybrid-tiny", "hybrid-text"] as const;

interface Answer {
	readonly version: string;
	readonly implementation: string;
	readonly seconds: readonly number[];
	readonly losses: readonly (number | null)[];
}

/** An interpreter that has PyTorch: MIMO_PYTHON, or python3 on the PATH; null when there is none. */
export function findPython(): string | null {
	const python = process.env.MIMO_PYTHON ?? Bun.which("python3");
	if (!python) return null;
	return Bun.spawnSync([python, "-c", "import torch"]).success ? python : null;
}

function askPython(python: string, threads: number, cases: readonly object[]): Answer {
	const child = Bun.spawnSync([python, join(import.meta.dir, "pytorch_reference.py")], {
		stdin: Buffer.from(JSON.stringify({ threads, cases })),
		stderr: "pipe",
	});
	if (!child.success) throw new Error(`pytorch_reference.py failed:\n${child.stderr}`);
	return JSON.parse(child.stdout.toString()) as Answer;
}

function withGradient(device: Device, shape: readonly number[], seed: number): Tensor {
	using plain = Tensor.from(device, randomValues(shape[0]! * shape[1]!, seed), shape);
	return plain.withGradient(new GradientSlot(device, shape, "f32"));
}

/** Forward and backward of `operation` on a fresh tape; gradients of the inputs are dropped. */
function forwardBackward(
	device: Device,
	inputs: readonly Tensor[],
	dy: Tensor,
	operation: (tape: Tape) => Tensor,
): void {
	const tape = new Tape(device, { recording: true });
	using y = operation(tape);
	y.gradient!.accumulate(dy.share());
	tape.backward();
	for (const { gradient } of inputs) gradient!.clear();
}

function attentionSeconds(device: Device, size: (typeof attentionSizes)[number]): number {
	const { batch, length, queries, keys, width } = size;
	using sequences = Sequences.batch(device, batch, length);
	using qkv = withGradient(device, [batch * length, (queries + 2 * keys) * width], 1);
	using dy = Tensor.from(device, randomValues(batch * length * queries * width, 2), [batch * length, queries * width]);
	const heads = { queryHeads: queries, keyHeads: keys, headDim: width };
	return measure(() =>
		forwardBackward(device, [qkv], dy, (tape) => attention(tape, qkv, { ...heads, sequences, mask: "causal" })),
	);
}

function scanSeconds(device: Device, size: (typeof scanSizes)[number]): number {
	const { batch, length, heads, width, groups, state, chunk } = size;
	const tokens = batch * length;
	using sequences = Sequences.batch(device, batch, length);
	using xBC = withGradient(device, [tokens, heads * width + 2 * groups * state], 1);
	using z = withGradient(device, [tokens, heads * width], 2);
	using dt = withGradient(device, [tokens, heads], 3);
	using dy = Tensor.from(device, randomValues(tokens * heads * width, 4), [tokens, heads * width]);
	const vector = (name: string, seed: number) =>
		new Parameter(name, Tensor.from(device, randomValues(heads, seed)), Tensor.zeros(device, [heads]));
	using dtBias = vector("dt_bias", 5);
	using aLog = vector("A_log", 6);
	using d = vector("D", 7);
	const inputs = { xBC, z, dt, dtBias, aLog, d, sequences };
	const sizes = { heads, headDim: width, groups, stateDim: state, chunkSize: chunk };
	return measure(() => forwardBackward(device, [xBC, z, dt], dy, (tape) => ssdScan(tape, { ...inputs, ...sizes })));
}

/** A training step of a reference folder's model on its first batch, and the loss of the very first. */
function stepSeconds(device: Device, folder: string): { seconds: number; loss: number } {
	const { optimizer: recipe, batch, seq } = readLanguageGolden(folder);
	using source = openHuggingFaceModel(folder);
	using model = new HybridModel(device, huggingFaceConfig(source, join(folder, "config.json"), "f32"), {
		frozen: false,
	});
	loadModel(model, source.weights);
	using scalars = new StepScalars(device);
	const [beta1, beta2] = recipe.betas;
	using optimizer = new AdamW([onlyReplica(model.parameters)], scalars, { beta1, beta2, epsilon: recipe.eps });
	using file = openSafetensors(join(folder, "batches.safetensors"));
	const tokens = file.read("tokens") as Int32Array;
	const sequences = Array.from({ length: batch }, (_, i) => tokens.subarray(i * (seq + 1), (i + 1) * (seq + 1)));
	const microbatches = [nextTokenMicrobatch(sequences)];
	const state = singleProcess({ model, optimizer, scalars, clipGrad: recipe.clip_grad, seed: 1 });
	let iteration = 0;
	const step = () =>
		trainStep(state, {
			microbatches,
			iteration: iteration++,
			learningRate: recipe.lr,
			weightDecay: recipe.weight_decay,
		});
	const { loss } = step();
	return { seconds: measure(step), loss };
}

const describe = (size: Readonly<Record<string, number>>) =>
	Object.entries(size)
		.map(([name, value]) => `${name} ${value}`)
		.join(", ");

export function benchPyTorch(device: Device, python: string): Row[] {
	const { threads } = device.describe();
	const folders = trainedFolders.flatMap((name) => golden(name) ?? []);
	const answer = askPython(python, threads, [
		...attentionSizes.map((size) => ({ kind: "attention", ...size })),
		...scanSizes.map((size) => ({ kind: "scan", ...size })),
		...folders.map((folder) => ({ kind: "step", golden: folder })),
	]);
	const theirs = [...answer.seconds];
	const group = `Forward and backward against ${answer.version}`;
	const rows: Row[] = [];
	const add = (operation: string, shape: string, baseline: string, target: number | null, seconds: number) =>
		rows.push(row({ group, operation, shape, threads, baseline, target }, [seconds, theirs.shift()!]));
	for (const size of attentionSizes) {
		add("causal attention", describe(size), "scaled_dot_product_attention", 1, attentionSeconds(device, size));
	}
	for (const size of scanSizes) {
		add("state space scan", describe(size), `${answer.implementation}'s scan`, null, scanSeconds(device, size));
	}
	for (const [index, folder] of folders.entries()) {
		const { seconds, loss } = stepSeconds(device, folder);
		const expected = answer.losses[attentionSizes.length + scanSizes.length + index]!;
		if (!(Math.abs(loss / expected - 1) < 1e-5)) {
			throw new Error(`The training step of ${folder} has loss ${loss}, PyTorch's ${expected}: they differ.`);
		}
		add("training step", trainedFolders[index]!, answer.implementation, 2, seconds);
	}
	return rows;
}
