/**
 * Decoding against Hugging Face transformers: a NemotronH of some 90 M parameters that transformers makes and saves, read from its
 * folder, greedily, the same prompts on as many threads, in turns.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openHuggingFaceModel } from "../../src/checkpoint/hf/parts.ts";
import { loadModel } from "../../src/checkpoint/model-store.ts";
import { decode } from "../../src/decode/decode.ts";
import { greedy } from "../../src/decode/sampling.ts";
import { HybridModel } from "../../src/models/language/model.ts";
import type { Device } from "../../src/native/device.ts";
import { groupOfOne } from "../../src/parallel/group.ts";
import { huggingFaceConfig } from "../../src/parity/language/parity.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { type Row, row } from "./measure.ts";
import { PythonScript } from "./python-script.ts";

const dtypes = ["f32", "bf16"] as const;
const batches = [1, 8] as const;
const [promptTokens, newTokens, rounds] = [64, 32, 5];

interface Answer {
	/** Seconds. */
	readonly prefill: number;
	/** Seconds of a step. */
	readonly decode: number;
	/** Seconds of processor time of a step, of all threads: what other work of the machine hardly changes. */
	readonly processor: number;
	readonly ids: readonly (readonly number[])[];
}

/** transformers in a process of its own. */
class Transformers implements Disposable {
	private constructor(
		private readonly script: PythonScript,
		readonly version: string,
		readonly parameters: number,
	) {}

	static async start(python: string, threads: number, folder: string): Promise<Transformers> {
		const script = new PythonScript(python, "pytorch_generate.py");
		const { version, parameters } = JSON.parse(await script.ask({ threads, folder }));
		return new Transformers(script, version, parameters);
	}

	async ask(dtype: string, prompt: readonly (readonly number[])[]): Promise<Answer> {
		return JSON.parse(await this.script.ask({ dtype, prompt, tokens: newTokens })) as Answer;
	}

	[Symbol.dispose](): void {
		this.script[Symbol.dispose]();
	}
}

function answerOf(model: HybridModel, prompt: readonly (readonly number[])[]): Answer {
	const alone = groupOfOne("language", 0);
	const used = () => {
		const { user, system } = process.cpuUsage();
		return (user + system) / 1e6;
	};
	const seen: number[] = [];
	const onToken = (sequence: number) => {
		if (sequence === 0) seen.push(used());
		return true;
	};
	const options = { endIds: [], most: newTokens, sampling: greedy, onToken };
	const prompts = { ids: prompt, rows: null, imageTokenId: -1 };
	const { ids, times } = decode(model, prompts, options, { group: alone, stages: alone, edges: new Map() });
	return {
		prefill: times.prefill.seconds,
		decode: times.decode.seconds / (newTokens - 1),
		processor: (seen.at(-1)! - seen[0]!) / (newTokens - 1),
		ids,
	};
}

/** Bytes a second that the threads of the device read, of a tensor that no cache holds; the most of several tries. */
function readBandwidth(device: Device): number {
	using large = Tensor.zeros(device, [2 ** 27]);
	using count = Tensor.zeros(device, [1], "f64");
	let best = 0;
	for (let round = 0; round < 12; round++) {
		const began = performance.now();
		device.run("count_zeros", { x: large, count, elements: large.elements });
		best = Math.max(best, large.bytes / ((performance.now() - began) / 1000));
	}
	return best;
}

/** Tokens that are the same until the first other one, of all. */
function agreement(ours: Answer, theirs: Answer): number {
	const same = ours.ids.map((own, s) => {
		const first = own.findIndex((id, i) => id !== theirs.ids[s]![i]);
		return first < 0 ? own.length : first;
	});
	return same.reduce((sum, count) => sum + count, 0) / ours.ids.flat().length;
}

/** Rows of prefill and decode, and lines about what bounds them. */
export async function benchGenerate(device: Device, python: string): Promise<{ rows: Row[]; notes: string[] }> {
	const { threads } = device.describe();
	const folder = mkdtempSync(join(tmpdir(), "mimo-bench-generate-"));
	try {
		using reference = await Transformers.start(python, threads, folder);
		const group = `Decoding of ${(reference.parameters / 1e6).toFixed(0)} M parameters against ${reference.version}`;
		let bandwidth = readBandwidth(device);
		const rows: Row[] = [];
		/** Lines of notes, once the highest bandwidth is known. */
		const notes: ((bandwidth: number) => string)[] = [];
		for (const dtype of dtypes) {
			const path = join(folder, dtype);
			using source = openHuggingFaceModel(path);
			const config = huggingFaceConfig(source, join(path, "config.json"), dtype);
			using model = new HybridModel(device, config, { frozen: true });
			loadModel(model, source.weights);
			// A step reads every weight, but a single row of the embedding for each sequence.
			const table = config.paddedVocabularySize * config.hiddenSize;
			const bytes = (reference.parameters - table) * (dtype === "bf16" ? 2 : 4);
			for (const batch of batches) {
				const prompt = Array.from({ length: batch }, (_, s) =>
					Array.from({ length: promptTokens }, (_, t) => (7919 * s + 104729 * t + 13 * t * t + 5) % 16384),
				);
				const endless = Number.POSITIVE_INFINITY;
				const least = [0, 1].map(() => ({ prefill: endless, decode: endless, processor: endless }));
				let shared = 0;
				for (let round = 0; round < rounds; round++) {
					const answers = [answerOf(model, prompt), await reference.ask(dtype, prompt)] as const;
					for (const [side, { prefill, decode: step, processor }] of answers.entries()) {
						const so = least[side]!;
						least[side] = {
							prefill: Math.min(so.prefill, prefill),
							decode: Math.min(so.decode, step),
							processor: Math.min(so.processor, processor),
						};
					}
					shared = agreement(...answers);
				}
				const [ours, theirs] = least as [(typeof least)[0], (typeof least)[0]];
				const shape = `${dtype}, batch ${batch}`;
				const what = { group, threads, baseline: "transformers", shape };
				rows.push(
					row({ ...what, operation: `prefill of ${promptTokens} tokens`, target: null }, [
						ours.prefill,
						theirs.prefill,
					]),
					row({ ...what, operation: "decode, a step", target: 2 }, [ours.decode, theirs.decode]),
				);
				// Disturbances of the machine only lower the measured bandwidth, so the largest is the nearest to the truth.
				bandwidth = Math.max(bandwidth, readBandwidth(device));
				notes.push(
					(highest) =>
						`${shape}: ${(batch / ours.decode).toFixed(1)} tokens/s, transformers ${(batch / theirs.decode).toFixed(1)}; ` +
						`${(bytes / 1e6).toFixed(0)} MB of weights a step, read at ${(highest / 1e9).toFixed(1)} GB/s, allow ${((batch * highest) / bytes).toFixed(1)} (${((100 * bytes) / ours.decode / highest).toFixed(0)} % reached); ` +
						`processor time of a step ${(1e3 * ours.processor).toFixed(1)} ms, transformers ${(1e3 * theirs.processor).toFixed(1)} (${(theirs.processor / ours.processor).toFixed(2)} times); ` +
						`${(100 * shared).toFixed(0)} % of the tokens before the first other one.`,
				);
			}
		}
		return { rows, notes: notes.map((note) => note(bandwidth)) };
	} finally {
		rmSync(folder, { recursive: true });
	}
}
