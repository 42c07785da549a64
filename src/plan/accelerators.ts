/**
 * Rates of GPUs for planning without one: operations timed on an H200 at the sizes of a 20-layer Nemotron model; for other GPUs
 * the same fractions of their vendors' peaks. `mimo plan --measure` replaces them with the machine's own.
 */
import { Activation, Dtype, MlpRecipe, type OperationName } from "../native/abi.ts";
import type { OperationValues } from "../native/counting-library.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { amountOf, isProduct, ratedName, workOf } from "./operation-work.ts";
import type { Rates } from "./rates.ts";

interface Accelerator {
	/** Dense bf16 operations a second. */
	readonly flops: number;
	/** Of memory, a second. */
	readonly bytes: number;
	readonly memory: number;
	/** Whether this program multiplies e4m3 on it. */
	readonly e4m3: boolean;
}

const h200: Accelerator = { flops: 989e12, bytes: 4.8e12, memory: 141e9, e4m3: true };
const accelerators: Readonly<Record<string, Accelerator>> = {
	a100: { flops: 312e12, bytes: 2.0e12, memory: 80e9, e4m3: false },
	h100: { flops: 989e12, bytes: 3.35e12, memory: 80e9, e4m3: true },
	h200,
	// Products in e4m3 are built for Hopper alone.
	b200: { flops: 2250e12, bytes: 8.0e12, memory: 180e9, e4m3: false },
};

export const acceleratorNames = Object.keys(accelerators);

/** Rates of an H200 in operations that were not timed: products, and bytes of everything else. */
const untimed = { product: 640e12, bytes: 3.7e12 };
/**
 * Times of experts in e4m3 over those in bf16, matrices rounded before, means of squared ReLU and SwiGLU in tests/bench/grouped-mlp.py
 * (docs/measurements/2026-11-23-h200.md#in-plans). The layer forward and backward without gradients of weights, less its two
 * permutations as a plan counts them: rows that the permutation has rounded (2.44 and 1.80 ms beside 3.59 and 2.65), rows that the
 * layer rounds, 0.10 ms each way more, and rows in e4m3 alone (2.32 and 1.67). Gradients of weights of rows in bf16, which they round
 * (0.969 ms beside 0.976), and of rows in e4m3 alone (1.87 and 1.61 beside 2.07 and 1.87 in the same
 * layer). A projection rounds its rows itself: the mean of Nemotron-3-Nano's (docs/measurements/2026-11-29-h200.md#projections-in-e4m3).
 */
const e4m3Times = {
	rounded: 0.635,
	rounding: 0.705,
	alone: 0.643,
	projection: 0.67,
	weightGradient: 0.99,
	weightGradientAlone: 0.88,
};
/** Seconds between two kernels, and of a kernel with almost no work. */
const [launchGap, leastKernel] = [2.5e-6, 4e-6];

/**
 * 8 GPUs on NVLink in a host and a 400 Gb/s port each between hosts. Inside: the rate of collectives of 10 to 40 MB
 * (docs/measurements/2026-11-22-h200.md). An exchange: time that the language model's step on two GPUs takes beyond
 * its operations and bytes, a layer of experts: the queue runs empty, and experts chosen unevenly keep one rank waiting for the other.
 * To the host: eight threads that copy from page-locked memory (docs/measurements/2026-11-29-restarts.md).
 */
export const gpuLinks: Pick<Rates, "inside" | "between" | "host" | "exchange" | "peers"> = {
	inside: { bytes: 240e9, latency: 15e-6 },
	between: { bytes: 40e9, latency: 30e-6 },
	host: 22e9,
	exchange: 2e-3,
	peers: true,
};

const dtype = Dtype.bf16;
const gemm = (m: number, n: number, k: number) => ({ m, n, k, batch: 1, beta: 0 });
const gelu = (inputs: number, outputs: number) => ({ rows: 16384, inputs, outputs, dtype });
const experts = { rows: 49152, n: 1856, k: 2688, groups: 64 };
const mlpInE4m3 = {
	...{ rows: 49152, hidden: 2688, width: 1856, groups: 64, kind: Activation.squaredRelu },
	...{ recipe: MlpRecipe.e4m3Blockwise, dtype },
};
const packed = (sequences: number, heads: number) => ({
	...{ tokens: 16384, sequences, mask: 0, query_heads: heads, key_heads: heads, head_dim: 80, value_dim: 80, dtype },
});
const causal = {
	tokens: 8192,
	sequences: 1,
	mask: 1,
	query_heads: 32,
	key_heads: 8,
	head_dim: 128,
	value_dim: 128,
	dtype,
};
const scan = { tokens: 8192, heads: 64, head_dim: 64, groups: 8, state_dim: 128, chunk_size: 128, dtype };
const hidden = { rows: 8192, width: 2688, dtype };
const patches = { rows: 16384, width: 1280, dtype };
const chosen = { tokens: 8192, topk: 6, width: 2688, dtype };
const convolution = { tokens: 8192, channels: 6144, width: 4, dtype };
const logits = { tokens: 8192, vocabulary_rows: 131072, dtype };
const gated = { rows: 49152, width: 1856, dtype };
const routed = { tokens: 8192, experts: 128 };

function untimedMilliseconds(name: OperationName, values: OperationValues): number {
	return (1000 * workOf(name, values).flops) / untimed.product;
}

type TimedCall = readonly [OperationName, OperationValues, milliseconds: number];

const weightGradientMilliseconds = 0.976;

/** Calls of experts in e4m3, from those in bf16. Pointers stand for the rows that are given. */
function expertsInE4m3(): TimedCall[] {
	const rows = {
		rounded: { x: 1, x_e4m3: 1, dy: 1, dy_e4m3: 1 },
		rounding: { x: 1, x_e4m3: 0, dy: 1, dy_e4m3: 0 },
		alone: { x: 0, x_e4m3: 1, dy: 0, dy_e4m3: 1 },
	} as const;
	const layers = (["rounded", "rounding", "alone"] as const).flatMap((form) =>
		(["grouped_mlp_forward", "grouped_mlp_backward"] as const).map((name) => {
			const values = { ...mlpInE4m3, ...rows[form] };
			return [name, values, e4m3Times[form] * untimedMilliseconds(name, values)] as const;
		}),
	);
	const weightGradient = (rowType: number, time: number) => {
		const values = { ...experts, recipe: MlpRecipe.e4m3Blockwise, dy_dtype: rowType, x_dtype: rowType };
		return ["grouped_gemm_weight_gradient", values, time * weightGradientMilliseconds] as const;
	};
	const square = { ...gemm(8192, 8192, 8192), rows: 8192, recipe: MlpRecipe.e4m3Blockwise, a_dtype: dtype };
	const projection: TimedCall = [
		"grouped_gemm",
		square,
		e4m3Times.projection * untimedMilliseconds("grouped_gemm", square),
	];
	return [
		...layers,
		projection,
		weightGradient(dtype, e4m3Times.weightGradient),
		weightGradient(Dtype.u8, e4m3Times.weightGradientAlone),
	];
}

/**
 * Calls queued without a pause, in milliseconds (docs/measurements/2026-11-22-h200.md, 2026-11-23-h200.md#norms-and-epilogues,
 * 2026-11-23-h200.md#attention-of-images and, of the scan, 2026-11-23-h200.md; docs/decisions/planning.md). Products of 32 and 64: the mean of a
 * router's three.
 */
const timedCalls: readonly TimedCall[] = [
	["gemm", gemm(8192, 2688, 32), 0.033],
	["gemm", gemm(8192, 2688, 64), 0.042],
	["gemm", gemm(16384, 1280, 640), 0.0486],
	["gemm", gemm(8192, 3712, 2688), 0.256],
	["gemm", gemm(8192, 2688, 4096), 0.279],
	["gemm", gemm(8192, 8192, 8192), 1.618],
	["gelu_gemm_forward", gelu(1280, 2560), 0.208],
	["gelu_gemm_forward", gelu(1280, 5120), 0.391],
	["gelu_gemm_backward", gelu(2560, 1280), 0.194],
	["gelu_gemm_backward", gelu(5120, 1280), 0.352],
	["grouped_gemm", experts, 0.794],
	["grouped_gemm_weight_gradient", experts, weightGradientMilliseconds],
	...expertsInE4m3(),
	["attention_forward", packed(64, 8), 0.0345],
	["attention_forward", packed(16, 8), 0.0984],
	["attention_forward", packed(4, 8), 0.365],
	["attention_forward", causal, 1.0],
	["attention_forward", packed(1, 8), 1.352],
	["attention_forward", packed(1, 16), 2.85],
	["attention_backward", packed(64, 8), 0.0982],
	["attention_backward", packed(16, 8), 0.2587],
	["attention_backward", packed(4, 8), 0.904],
	["attention_backward", causal, 2.849],
	["attention_backward", packed(1, 8), 3.44],
	["attention_backward", packed(1, 16), 6.793],
	["ssd_forward", scan, 0.189],
	["ssd_backward", scan, 0.382],
	["rms_norm_forward", hidden, 0.024],
	["rms_norm_backward", hidden, 0.05],
	["layer_norm_forward", patches, 0.022],
	["layer_norm_backward", patches, 0.049],
	["activation_forward", gated, 0.093],
	["activation_backward", gated, 0.128],
	["router_forward", routed, 0.005],
	["moe_permute", chosen, 0.085],
	["moe_unpermute", chosen, 0.082],
	["embedding_backward", { tokens: 8192, width: 2688, vocabulary_rows: 131072, dtype }, 0.209],
	["causal_conv1d_forward", convolution, 0.055],
	["causal_conv1d_backward", convolution, 0.088],
	["cross_entropy_statistics", logits, 0.478],
	["cross_entropy_backward", logits, 1.132],
	["adamw", { elements: 2 ** 28, model: 1 }, 1.91],
	["sum_of_squares", { elements: 2 ** 28 }, 0.249],
];

export interface AcceleratorRates {
	readonly rates: Rates;
	readonly memoryBytes: number;
	/** Whether it multiplies e4m3. */
	readonly e4m3: boolean;
}

/** Rates of a GPU by its short name. */
export function acceleratorRates(name: string): AcceleratorRates {
	const known = accelerators[name];
	if (!known)
		throw new UserError(`There are no rates of a ${name}; known are ${acceleratorNames.join(", ")}.`, exitCodes.usage);
	const slower = { product: h200.flops / known.flops, bytes: h200.bytes / known.bytes };
	const operations: Rates["operations"] = {};
	for (const [operation, values, milliseconds] of timedCalls) {
		const rated = ratedName(operation, values);
		const amount = amountOf(rated, workOf(operation, values));
		const seconds = Math.max(leastKernel, (milliseconds / 1000) * slower[isProduct(rated) ? "product" : "bytes"]);
		operations[rated] ??= [];
		operations[rated].push({ amount, seconds });
	}
	for (const points of Object.values(operations)) {
		points.sort((a, b) => a.amount - b.amount);
		// Below the smallest size that was timed its rate holds, down to the time that any kernel takes.
		const { amount, seconds } = points[0]!;
		if (seconds > leastKernel) points.unshift({ amount: (amount * leastKernel) / seconds, seconds: leastKernel });
	}
	return {
		memoryBytes: known.memory,
		e4m3: known.e4m3,
		rates: {
			device: name.toUpperCase(),
			cores: null,
			threads: 1,
			operations,
			product: untimed.product / slower.product,
			bytes: untimed.bytes / slower.bytes,
			call: launchGap,
			...gpuLinks,
		},
	};
}
