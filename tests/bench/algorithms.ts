/**
 * `bun tests/bench/algorithms.ts [--json FILE]`: products and attentions of the models, with the algorithm that cuBLASLt and
 * cuDNN name first and with the one that was timed, in turns in one process. Operands are rotated past the L2 cache; times
 * are medians of rounds. The ceiling is a product of 8192 x 8192 x 8192, before, between and after; clocks and power are read
 * while it runs. Then each chosen algorithm's results against those of the first, and against a second run of its own.
 */
import { parseArgs } from "node:util";
import { Dtype } from "../../src/native/abi.ts";
import { Device } from "../../src/native/device.ts";
import { openLibrary } from "../../src/native/library.ts";
import { median } from "../../src/observe/series.ts";
import type { Tensor } from "../../src/tensor/tensor.ts";
import { attentionCalls, attentionWork, type Heads } from "./cuda-attention.ts";
import { Tensors } from "./cuda-case.ts";

interface Call {
	readonly name: string;
	readonly shape: string;
	readonly flops: number;
	/** Bytes of one set of operands. */
	readonly bytes: number;
	/** Makes a set of operands; its call, and what it writes. */
	readonly make: (x: Tensors) => { readonly run: () => void; readonly result: Tensor };
}

interface Row {
	readonly name: string;
	readonly shape: string;
	readonly first: number;
	readonly timed: number;
	readonly firstRate: number;
	readonly timedRate: number;
	/** Least and largest microseconds of the rounds, first then timed. */
	readonly spread: readonly [number, number, number, number];
	readonly candidates: number;
	readonly algorithm: string;
	/** Whether the results are the same in two runs. */
	readonly repeats: boolean;
	/** Root mean square of the difference to the first algorithm's results, over that of the results. */
	readonly difference: number;
}

const rounds = 5;
const sampleSeconds = 0.02;
/** Twice the L2 cache of an H200. */
const rotatedBytes = 2 * 60 * 2 ** 20;
const mostSets = 6;
const { bf16, f32 } = Dtype;

type Kind = "forward" | "input gradient" | "weight gradient";

/** A product of `rows` tokens by a weight [outputs, inputs], or its gradients: that of the weight is added in fp32. */
function product(kind: Kind, layer: string, rows: number, outputs: number, inputs: number): Call {
	const [m, n, k] =
		kind === "forward"
			? [rows, outputs, inputs]
			: kind === "input gradient"
				? [rows, inputs, outputs]
				: [outputs, inputs, rows];
	const summed = kind === "weight gradient";
	const [transposeA, transposeB] = [summed ? 1 : 0, kind === "forward" ? 1 : 0];
	return {
		name: `${layer} ${kind}`,
		shape: `${m} x ${n} x ${k}`,
		flops: 2 * m * n * k,
		bytes: 2 * (m * k + n * k) + (summed ? 4 : 2) * m * n,
		make: (x) => {
			const a = x.random(transposeA ? [k, m] : [m, k]);
			const b = x.random(transposeB ? [n, k] : [k, n], "bf16", summed ? 1 : 0.02);
			const c = x.random([m, n], summed ? "f32" : "bf16");
			const args = {
				a,
				b,
				c,
				bias: null,
				m,
				n,
				k,
				a_stride: a.width,
				b_stride: b.width,
				c_stride: n,
				batch: 1,
				a_batch_stride: 0,
				b_batch_stride: 0,
				c_batch_stride: 0,
				alpha: 1,
				beta: summed ? 1 : 0,
				a_dtype: bf16,
				b_dtype: bf16,
				c_dtype: summed ? f32 : bf16,
				transpose_a: transposeA,
				transpose_b: transposeB,
				beside_collective: 0,
			};
			return { run: () => x.device.run("gemm", args), result: c };
		},
	};
}

const kinds: readonly Kind[] = ["forward", "input gradient", "weight gradient"];

function layer(name: string, rows: number, outputs: number, inputs: number): Call[] {
	return kinds.map((kind) => product(kind, name, rows, outputs, inputs));
}

const patches = 16_384;
const tokens = 8192;
const hidden = 2688;

/** RADIO-H's layers on a tensor-parallel rank of two and of one, and those of Nemotron 3 Nano's language model. */
const products: readonly Call[] = [
	...[2, 1].flatMap((ranks) => [
		...layer(`tp${ranks} qkv`, patches, 3840 / ranks, 1280),
		...layer(`tp${ranks} proj`, patches, 1280, 1280 / ranks),
		...layer(`tp${ranks} fc1`, patches, 5120 / ranks, 1280),
		...layer(`tp${ranks} fc2`, patches, 1280, 5120 / ranks),
	]),
	...layer("Mamba in", tokens, 10_304, hidden),
	...layer("LM qkv", tokens, 4608, hidden),
	...layer("Mamba out, proj", tokens, hidden, 4096),
	...layer("shared fc1", tokens, 3712, hidden),
	...layer("shared fc2", tokens, hidden, 3712),
	...layer("head", tokens, 131_072, hidden),
];

/** Attention forward and backward. */
function attention(heads: Heads): Call[] {
	const { lengths, queries, keys, size, causal } = heads;
	const tokensOfAll = lengths.reduce((a, b) => a + b, 0);
	const bytes = 2 * tokensOfAll * size * (2 * queries + 2 * keys);
	const flops = attentionWork(heads);
	const shape = `${lengths.length} x ${lengths[0]}, ${queries}/${keys} heads of ${size}${causal ? ", causal" : ""}`;
	return [
		{ name: "attention", shape, flops, bytes, make: (x) => attentionCalls(x, heads).forward },
		{
			name: "attention backward",
			shape,
			flops: 2.5 * flops,
			bytes: 2 * bytes,
			make: (x) => {
				const { forward, backward } = attentionCalls(x, heads);
				forward.run();
				return backward;
			},
		},
	];
}

const attentions: readonly Call[] = [
	...attention({ lengths: [tokens], queries: 32, keys: 2, size: 128, causal: true }),
	...attention({ lengths: [tokens], queries: 32, keys: 8, size: 128, causal: true }),
	...attention({ lengths: [patches], queries: 16, keys: 16, size: 128, causal: true }),
	...attention({ lengths: [3000, 1000, 2500, 1692], queries: 32, keys: 2, size: 128, causal: true }),
	...attention({ lengths: [patches], queries: 16, keys: 16, size: 80, causal: false }),
	...attention({ lengths: new Array(64).fill(256), queries: 16, keys: 16, size: 64, causal: false }),
];

const seconds = (device: Device, run: (call: number) => void, calls: number) => {
	device.synchronize();
	const started = performance.now();
	for (let call = 0; call < calls; call++) run(call);
	device.synchronize();
	return (performance.now() - started) / 1000 / calls;
};

/** TFLOP/s of a product that fills the GPU, with its clock and power meanwhile. */
function ceiling(device: Device): { rate: number; state: string } {
	using x = new Tensors(device);
	const size = 8192;
	const { run } = product("forward", "ceiling", size, size, size).make(x);
	const calls = 100;
	seconds(device, run, 10);
	const rate = (2 * size ** 3) / seconds(device, run, calls) / 1e12;
	for (let call = 0; call < 600; call++) run();
	const query = ["--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"];
	const { stdout } = Bun.spawnSync(["nvidia-smi", ...query]);
	device.synchronize();
	return { rate, state: stdout.toString().trim().split("\n")[0] ?? "" };
}

function values(device: Device, { result }: { readonly result: Tensor }): Uint8Array {
	const bytes = new Uint8Array(Math.min(result.bytes, 2 ** 22));
	device.copyToHost(bytes, result);
	return bytes;
}

const floats = (bytes: Uint8Array, isF32: boolean): Float32Array =>
	isF32
		? new Float32Array(bytes.buffer)
		: new Float32Array(Uint32Array.from(new Uint16Array(bytes.buffer), (half) => half << 16).buffer);

function difference(one: Float32Array, other: Float32Array): number {
	let [squares, size] = [0, 0];
	for (let i = 0; i < one.length; i++) {
		squares += (one[i]! - other[i]!) ** 2;
		size += one[i]! ** 2;
	}
	return Math.sqrt(squares / size);
}

/** The results of one call on fresh operands under a choice of algorithms. */
function resultOf(device: Device, call: Call, choices: string): Uint8Array {
	device.setAlgorithms(choices);
	using x = new Tensors(device);
	const made = call.make(x);
	made.run();
	return values(device, made);
}

function measure(device: Device, call: Call): Row {
	const before = device.timedAlgorithms();
	const spread: [number, number, number, number] = [0, 0, 0, 0];
	const medians: [number, number] = [0, 0];
	let choice = "";
	{
		using x = new Tensors(device);
		const sets = Math.max(1, Math.min(mostSets, Math.ceil(rotatedBytes / call.bytes)));
		device.setAlgorithms("");
		const made = Array.from({ length: sets }, () => call.make(x));
		const run = (index: number) => made[index % sets]!.run();
		run(0);
		device.timeAlgorithms();
		choice = device.timedAlgorithms().slice(before.length);
		const calls = Math.max(2, Math.ceil(sampleSeconds / seconds(device, run, 3)));
		const samples: [number[], number[]] = [[], []];
		for (let round = 0; round < rounds; round++) {
			for (const side of [0, 1] as const) {
				device.setAlgorithms(side === 0 ? "" : choice);
				seconds(device, run, 2);
				samples[side].push(seconds(device, run, calls) * 1e6);
			}
		}
		for (const side of [0, 1] as const) {
			medians[side] = median(samples[side]);
			spread[2 * side] = Math.min(...samples[side]);
			spread[2 * side + 1] = Math.max(...samples[side]);
		}
	}
	const [first, timed, again] = ["", choice, choice].map((text) => resultOf(device, call, text)) as [
		Uint8Array,
		Uint8Array,
		Uint8Array,
	];
	device.trimMemory();
	const [, algorithm = "", , , candidates = "0"] = choice.trim().split("\n").at(-1)!.split("\t");
	const isF32 = call.name.endsWith("weight gradient");
	return {
		name: call.name,
		shape: call.shape,
		first: medians[0],
		timed: medians[1],
		firstRate: call.flops / medians[0] / 1e6,
		timedRate: call.flops / medians[1] / 1e6,
		spread,
		candidates: Number(candidates),
		algorithm,
		repeats: Buffer.compare(timed, again) === 0,
		difference: difference(floats(first, isF32), floats(timed, isF32)),
	};
}

function line(row: Row): string {
	const cells = [
		row.name.padEnd(26),
		row.shape.padEnd(42),
		row.first.toFixed(1).padStart(9),
		row.timed.toFixed(1).padStart(9),
		row.firstRate.toFixed(0).padStart(6),
		row.timedRate.toFixed(0).padStart(6),
		(row.first / row.timed).toFixed(3).padStart(7),
		String(row.candidates).padStart(4),
		row.difference.toExponential(1).padStart(9),
		row.repeats ? "repeats" : "DIFFERS between two runs",
		row.spread.map((microseconds) => microseconds.toFixed(0)).join(" "),
		row.name.startsWith("attention") ? row.algorithm : "",
	];
	return cells.join("  ").trimEnd();
}

const { values: flags } = parseArgs({ options: { json: { type: "string" } } });
const library = await openLibrary("cuda");
using device = Device.open(library);
console.log(`${device.describe().name}; ${library.versions}`);
const ceilings: { rate: number; state: string }[] = [];
const atCeiling = () => {
	const found = ceiling(device);
	ceilings.push(found);
	console.log(`8192 x 8192 x 8192: ${found.rate.toFixed(0)} TFLOP/s; ${found.state}`);
};
const rows: Row[] = [];
atCeiling();
console.log(
	"microseconds and TFLOP/s of the first answer and of the timed choice, their ratio, candidates, difference",
);
for (const calls of [products, attentions]) {
	for (const call of calls) {
		const row = measure(device, call);
		rows.push(row);
		console.log(line(row));
	}
	atCeiling();
}
if (flags.json) {
	await Bun.write(flags.json, `${JSON.stringify({ device: device.describe().name, ceilings, rows }, null, "\t")}\n`);
}
