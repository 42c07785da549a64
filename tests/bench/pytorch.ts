/** Attention, the state space scan and the whole training step against PyTorch on as many threads. */
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { openHuggingFaceModel } from "../../src/checkpoint/hf/parts.ts";
import { loadModel } from "../../src/checkpoint/model-store.ts";
import { openSafetensors } from "../../src/checkpoint/safetensors.ts";
import { nextTokenMicrobatch, withoutImages } from "../../src/data/microbatch.ts";
import type { Device } from "../../src/native/device.ts";
import { languageAlone, topologyOfLayout } from "../../src/parallel/layout.ts";
import { World } from "../../src/parallel/world.ts";
import { huggingFaceConfig, readLanguageGolden } from "../../src/parity/language/parity.ts";
import { GradientSlot } from "../../src/tensor/gradient.ts";
import { attention } from "../../src/tensor/ops/attention.ts";
import { ssdScan } from "../../src/tensor/ops/ssd.ts";
import { Parameter } from "../../src/tensor/parameter.ts";
import { Sequences } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { assemble } from "../../src/train/assemble.ts";
import { trainStep } from "../../src/train/step.ts";
import { golden } from "../golden.ts";
import { randomValues } from "../support.ts";
import { compare, type Row, row, type Timed, timed } from "./measure.ts";
import { PythonScript } from "./python-script.ts";

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
/** Larger models of the same kind, made with transformers: the larger, the more of a step is products of matrices. */
const trainedSizes = {
	"11 M": {
		...{ batch: 2, seq: 256, vocab_size: 4096, hidden_size: 256, layers_block_type: layersOf("MEM*EMEM-E") },
		...{ mamba_num_heads: 16, mamba_head_dim: 32, ssm_state_size: 64, n_groups: 2, chunk_size: 64 },
		...{ num_attention_heads: 8, num_key_value_heads: 2, head_dim: 32, intermediate_size: 512 },
		...{ n_routed_experts: 16, moe_intermediate_size: 192, moe_shared_expert_intermediate_size: 384 },
	},
	"38 M": {
		...{ batch: 2, seq: 512, vocab_size: 8192, hidden_size: 512, layers_block_type: layersOf("MEM*EM-E") },
		...{ mamba_num_heads: 16, mamba_head_dim: 64, ssm_state_size: 128, n_groups: 4, chunk_size: 128 },
		...{ num_attention_heads: 8, num_key_value_heads: 2, head_dim: 64, intermediate_size: 1024 },
		...{ n_routed_experts: 16, moe_intermediate_size: 384, moe_shared_expert_intermediate_size: 768 },
	},
} as const;

/** Hugging Face's names of the layers of a pattern. */
function layersOf(pattern: string): string[] {
	const names: Readonly<Record<string, string>> = {
		M: "linear_attention",
		E: "moe",
		"*": "full_attention",
		"-": "mlp",
	};
	return [...pattern].map((letter) => names[letter]!);
}

/** An interpreter that has PyTorch: MIMO_PYTHON, or python3 on the PATH; null when there is none. */
export function findPython(): string | null {
	const python = process.env.MIMO_PYTHON ?? Bun.which("python3");
	if (!python) return null;
	return Bun.spawnSync([python, "-c", "import torch"]).success ? python : null;
}

/** Folders with models of `trainedSizes`, as the references have them; none without transformers. */
class MadeFolders implements Disposable {
	readonly folders: readonly string[];

	constructor(
		python: string,
		private readonly root = mkdtempSync(join(tmpdir(), "mimo-bench-")),
	) {
		if (!Bun.spawnSync([python, "-c", "import transformers"]).success) {
			this.folders = [];
			return;
		}
		const script = join(import.meta.dir, "pytorch_model.py");
		this.folders = Object.entries(trainedSizes).map(([name, sizes]) => {
			const folder = join(root, name);
			mkdirSync(folder);
			const made = Bun.spawnSync([python, script, golden("hybrid-text"), folder, JSON.stringify(sizes)]);
			if (!made.success) throw new Error(`pytorch_model.py failed: ${made.stderr}`);
			return folder;
		});
	}

	[Symbol.dispose](): void {
		rmSync(this.root, { recursive: true });
	}
}

/** PyTorch with its cases set up, in a process of its own: case after case is timed when asked. */
class PyTorch implements Disposable {
	private constructor(
		private readonly script: PythonScript,
		readonly version: string,
		readonly implementation: string,
		/** Loss of each case's first step; null where a case has none. */
		readonly losses: readonly (number | null)[],
	) {}

	static async start(python: string, threads: number, cases: readonly object[]): Promise<PyTorch> {
		const script = new PythonScript(python, "pytorch_reference.py");
		const { version, implementation, losses } = JSON.parse(await script.ask({ threads, cases }));
		return new PyTorch(script, version, implementation, losses);
	}

	/** Case `index` as one side of a comparison. */
	timed(index: number): Timed {
		return async (calls) => Number(await this.script.ask([index, calls]));
	}

	[Symbol.dispose](): void {
		this.script[Symbol.dispose]();
	}
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

type Seconds = readonly [ours: number, baseline: number];

async function compareAttention(
	device: Device,
	size: (typeof attentionSizes)[number],
	theirs: Timed,
): Promise<Seconds> {
	const { batch, length, queries, keys, width } = size;
	using sequences = Sequences.batch(device, batch, length);
	using qkv = withGradient(device, [batch * length, (queries + 2 * keys) * width], 1);
	using dy = Tensor.from(device, randomValues(batch * length * queries * width, 2), [batch * length, queries * width]);
	const heads = { queryHeads: queries, keyHeads: keys, headDim: width };
	const step = () =>
		forwardBackward(device, [qkv], dy, (tape) => attention(tape, qkv, { ...heads, sequences, mask: "causal" }));
	return await compare(timed(step), theirs);
}

async function compareScan(device: Device, size: (typeof scanSizes)[number], theirs: Timed): Promise<Seconds> {
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
	const step = () => forwardBackward(device, [xBC, z, dt], dy, (tape) => ssdScan(tape, { ...inputs, ...sizes }));
	return await compare(timed(step), theirs);
}

/** A training step of a reference folder's model on its first batch, whose very first loss is `expected`. */
async function compareStep(device: Device, folder: string, expected: number, theirs: Timed): Promise<Seconds> {
	const { optimizer: recipe, batch, seq } = readLanguageGolden(folder);
	using source = openHuggingFaceModel(folder);
	const [beta1, beta2] = recipe.betas;
	const specification = {
		...{ encoders: [], clipGrad: recipe.clip_grad, seed: 1 },
		language: huggingFaceConfig(source, join(folder, "config.json"), "f32"),
		frozenLanguage: false,
		adam: { beta1, beta2, epsilon: recipe.eps },
	};
	using run = await assemble(specification, topologyOfLayout(languageAlone), World.alone(device));
	loadModel(run.language!, source.weights);
	using file = openSafetensors(join(folder, "batches.safetensors"));
	const tokens = file.read("tokens") as Int32Array;
	const sequences = Array.from({ length: batch }, (_, i) => tokens.subarray(i * (seq + 1), (i + 1) * (seq + 1)));
	const microbatches = [withoutImages(nextTokenMicrobatch(sequences))];
	let iteration = 0;
	const step = () =>
		trainStep(run.state, {
			microbatches,
			iteration: iteration++,
			learningRate: recipe.lr,
			weightDecay: recipe.weight_decay,
		});
	const { loss } = step();
	if (!(Math.abs(loss / expected - 1) < 1e-5)) {
		throw new Error(`The training step of ${folder} has loss ${loss}, PyTorch's ${expected}: they differ.`);
	}
	return await compare(timed(step), theirs);
}

const describe = (size: Readonly<Record<string, number>>) =>
	Object.entries(size)
		.map(([name, value]) => `${name} ${value}`)
		.join(", ");

export async function benchPyTorch(device: Device, python: string): Promise<Row[]> {
	const { threads } = device.describe();
	using made = new MadeFolders(python);
	const folders = [...trainedFolders.map(golden), ...made.folders];
	using pytorch = await PyTorch.start(python, threads, [
		...attentionSizes.map((size) => ({ kind: "attention", ...size })),
		...scanSizes.map((size) => ({ kind: "scan", ...size })),
		...folders.map((folder) => ({ kind: "step", golden: folder })),
	]);
	const { implementation } = pytorch;
	const group = `Forward and backward against ${pytorch.version}`;
	const rows: Row[] = [];
	const add = (operation: string, shape: string, baseline: string, target: number | null, seconds: Seconds) =>
		rows.push(row({ group, operation, shape, threads, baseline, target }, seconds));
	let index = 0;
	for (const size of attentionSizes) {
		const seconds = await compareAttention(device, size, pytorch.timed(index++));
		add("causal attention", describe(size), "scaled_dot_product_attention", 1, seconds);
	}
	for (const size of scanSizes) {
		const seconds = await compareScan(device, size, pytorch.timed(index++));
		add("state space scan", describe(size), `${implementation}'s scan`, null, seconds);
	}
	for (const folder of folders) {
		const seconds = await compareStep(device, folder, pytorch.losses[index]!, pytorch.timed(index++));
		add("training step", basename(folder), implementation, 2, seconds);
	}
	return rows;
}
