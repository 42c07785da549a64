/** A step with a cache gives the logits that a pass over the whole sequence gives, for every kind of layer. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import type { Key } from "../../src/config/schema.ts";
import { DeviceInput } from "../../src/data/device-input.ts";
import { DecodingCache } from "../../src/decode/cache.ts";
import { StepInput } from "../../src/decode/decode.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../src/models/language/model.ts";
import type { ForwardInput } from "../../src/models/language/model-chunk.ts";
import type { Device } from "../../src/native/device.ts";
import { TokenSlice } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { smallModel } from "../models/small.ts";
import { relativeRms, testDevice } from "../support.ts";

let device: Device;
beforeAll(async () => {
	device = await testDevice();
});
afterAll(() => device[Symbol.dispose]());

const vocabulary = 61;

/** Sequences whose prompts are shorter than the convolution, as long as a chunk of the scan, and longer. */
const prompts = [1, 2, 3, 16, 21] as const;
const steps = 7;
const sequences = prompts.map((prompt, s) =>
	Array.from({ length: prompt + steps }, (_, t) => (11 * s + 7 * t + ((t * t) % 5)) % vocabulary),
);

function modelOf(changes: Partial<Record<Key, unknown>>): HybridModel {
	const c = configurationOf({ ...smallModel, "init-method-std": 0.3, ...changes });
	const config = hybridConfig(c);
	// An adapter that changes the weight.
	const lora = config.lora && { ...config.lora, start: "drawn" as const };
	const model = new HybridModel(device, { ...config, lora }, { frozen: true });
	model.initialise(3);
	return model;
}

/** Logits of all tokens, a row of the whole vocabulary each. */
function logitsOf(model: HybridModel, forward: ForwardInput): (row: number) => Float32Array {
	using logits = model.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null);
	const values = logits.toFloat32();
	const { width } = logits;
	return (row) => values.subarray(row * width, row * width + vocabulary);
}

function inputOf(model: HybridModel, texts: readonly (readonly number[])[]): DeviceInput {
	const ids = Int32Array.from(texts.flat());
	const tokens = ids.length;
	const lengths = texts.map(({ length }) => length);
	const text = { ids, labels: new Int32Array(tokens), lossMask: new Float32Array(tokens), lengths };
	return new DeviceInput(device, text, model.parallel);
}

/** Logits that follow every prompt and every token after it, from passes over whole sequences. */
function wholePasses(model: HybridModel): Float32Array[][] {
	return sequences.map((ids, s) => {
		using input = inputOf(model, [ids]);
		const row = logitsOf(model, input.forward(0, TokenSlice.of(0, ids.length)));
		return Array.from({ length: steps + 1 }, (_, step) => row(prompts[s]! - 1 + step).slice());
	});
}

/** Logits of every step with a cache; a sequence leaves the batch after `until(s)` steps. */
function cachedSteps(model: HybridModel, until: (sequence: number) => number = () => steps): Float32Array[][] {
	using cache = new DecodingCache(device, [...sequences.map(({ length }) => length), 1]);
	const starts = sequences.map((ids, s) => ids.slice(0, prompts[s]!));
	const found: Float32Array[][] = sequences.map(() => []);
	{
		using input = inputOf(model, [...starts, []]);
		const tokens = input.ids.elements;
		using filling = cache.fill(input.sequences.lengths);
		const row = logitsOf(model, {
			...input.forward(0, TokenSlice.of(0, tokens)),
			mixing: (layer) => filling.of(layer),
		});
		let end = 0;
		for (const [s, ids] of starts.entries()) {
			end += ids.length;
			found[s]!.push(row(end - 1).slice());
		}
	}
	using step = new StepInput(model, cache, sequences.length);
	for (let taken = 0; taken < steps; taken++) {
		const active = sequences.flatMap((ids, s) => {
			const length = prompts[s]! + taken;
			return taken < until(s) ? [{ sequence: s, id: ids[length]!, length, shift: 0 }] : [];
		});
		const row = logitsOf(model, step.of(active).forward);
		for (const [index, { sequence }] of active.entries()) found[sequence]!.push(row(index).slice());
	}
	return found;
}

function worst(actual: readonly Float32Array[][], expected: readonly Float32Array[][]): number {
	return Math.max(...actual.flatMap((rows, s) => rows.map((row, step) => relativeRms(row, expected[s]![step]!))));
}

const kinds: Readonly<Record<string, Partial<Record<Key, unknown>>>> = {
	"Mamba-2": { "hybrid-layer-pattern": "MM" },
	"Mamba-2 of one group": { "hybrid-layer-pattern": "MM", "mamba-num-groups": 1 },
	attention: { "hybrid-layer-pattern": "**" },
	"attention with rotary positions": { "hybrid-layer-pattern": "**", "position-embedding-type": "rope" },
	"attention of Llama 3 and Qwen3": {
		...{ "hybrid-layer-pattern": "*-*-", "position-embedding-type": "rope", "use-rope-scaling": true },
		...{ "rope-scaling-original-max-position-embeddings": 16, "qk-layernorm": true, "add-qkv-bias": true },
	},
	"attention with YaRN": {
		...{ "hybrid-layer-pattern": "**", "position-embedding-type": "yarn", "rotary-scaling-factor": 4 },
		...{ "yarn-original-max-position-embeddings": 16, "yarn-correction-range-round-to-int": false },
	},
	"attention in windows by layer, with norms behind layers as Gemma's": {
		...{ "hybrid-layer-pattern": "*-*-", "window-size": [3, 0], "window-attn-skip-freq": [1, 0, 0, 0] },
		...{ "position-embedding-type": "rope", "rotary-base-local": 100, "post-layernorm": true },
		...{ "apply-layernorm-1p": true, "qk-layernorm": true, "embedding-multiplier": 4 },
	},
	"Gated DeltaNet and gated attention": {
		...{
			"hybrid-layer-pattern": "G*GG",
			"attention-output-gate": true,
			"apply-layernorm-1p": true,
			"qk-layernorm": true,
		},
		...{
			"linear-num-key-heads": 2,
			"linear-num-value-heads": 4,
			// Of narrower keys some token's output nearly cancels, and its norm raises the rounding to that.
			"linear-key-head-dim": 24,
			"linear-value-head-dim": 8,
		},
	},
	"attention with sinks in windows by layer": {
		...{ "hybrid-layer-pattern": "*-*-", "window-size": [3, 0], "window-attn-skip-freq": [1, 0, 0, 0] },
		...{ "position-embedding-type": "rope", "softmax-type": "learnable" },
	},
	"multi-latent attention": {
		...{ "hybrid-layer-pattern": "+-+-", "num-query-groups": smallModel["num-attention-heads"], "q-lora-rank": 12 },
		...{ "kv-lora-rank": 10, "qk-head-dim": 6, "qk-pos-emb-head-dim": 4, "v-head-dim": 5, "qk-layernorm": true },
		...{ "rotary-scaling-factor": 4, "yarn-original-max-position-embeddings": 8, "mscale-all-dim": 1 },
	},
	"multi-latent attention without latents of queries, with an adapter": {
		...{ "hybrid-layer-pattern": "++", "num-query-groups": smallModel["num-attention-heads"], "kv-lora-rank": 10 },
		...{ "qk-head-dim": 6, "qk-pos-emb-head-dim": 4, "v-head-dim": 5, "rope-type": "rope" },
		...{ "lora-rank": 2, "lora-target-modules": ["linear_kv_up_proj", "linear_q_proj"] },
	},
	MLP: { "hybrid-layer-pattern": "M-*-" },
	"mixture of experts": { "hybrid-layer-pattern": "ME*E" },
	"every kind": {},
};

for (const [kind, changes] of Object.entries(kinds)) {
	test(`${kind}: fp32 to 1e-5, bf16 to its rounding`, () => {
		using single = modelOf(changes);
		expect(worst(cachedSteps(single), wholePasses(single))).toBeLessThan(1e-5);
		using half = modelOf({ ...changes, bf16: true });
		const whole = wholePasses(half);
		// It does compute in bf16: its logits are not those of fp32.
		expect(worst(whole, wholePasses(single))).toBeGreaterThan(1e-3);
		// The orders of the sums differ, so that single values round the other way, by 2⁻⁸ of them; on a GPU more of them, where
		// products of a few rows and of many come from different kernels.
		const cached = cachedSteps(half);
		if (kind.startsWith("multi-latent")) {
			// A step rounds queries times a weight and sums of latents, instead of keys and values: as far from fp32.
			const exact = wholePasses(single);
			expect(worst(cached, exact)).toBeLessThan(1.5 * worst(whole, exact));
		} else expect(worst(cached, whole)).toBeLessThan(device.library.kind === "cpu" ? 0.01 : 0.02);
	});
}

test("sequences leave the batch and the others go on as before", () => {
	using model = modelOf({});
	const whole = wholePasses(model);
	const until = (s: number) => [1, 7, 0, 4, 7][s]!;
	const found = cachedSteps(model, until);
	expect(found.map(({ length }) => length)).toEqual(prompts.map((_, s) => until(s) + 1));
	expect(worst(found, whole)).toBeLessThan(1e-5);
});

test("nothing is left in device memory", () => {
	using model = modelOf({});
	const before = device.memoryStatistics().liveBytes;
	cachedSteps(model);
	expect(device.memoryStatistics().liveBytes).toBe(before);
});
