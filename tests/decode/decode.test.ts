/**
 * Decoding: every token is the likeliest after those before it, as one pass over the finished text sees it; drawn tokens depend
 * on the seed and the sequence alone.
 */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { configurationOf } from "../../src/config/resolve.ts";
import { DeviceInput } from "../../src/data/device-input.ts";
import { decode, type Prompts } from "../../src/decode/decode.ts";
import { greedy, type SamplingOptions } from "../../src/decode/sampling.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../src/models/language/model.ts";
import type { Device } from "../../src/native/device.ts";
import { groupOfOne } from "../../src/parallel/group.ts";
import { TokenSlice } from "../../src/tensor/sequences.ts";
import { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { smallModel } from "../models/small.ts";
import { randomValues, testDevice } from "../support.ts";

let device: Device;
let model: HybridModel;
beforeAll(async () => {
	device = await testDevice();
	const c = configurationOf({
		...smallModel,
		"init-method-std": 0.3,
	});
	model = new HybridModel(device, hybridConfig(c), { frozen: false });
	model.initialise(3);
});
afterAll(() => {
	model[Symbol.dispose]();
	device[Symbol.dispose]();
});

/** Outside the vocabulary: never generated. */
const imageTokenId = 99;

/** Likeliest next token after every token of one sequence; `images`: rows for its image tokens. */
function likeliest(ids: readonly number[], images: Float32Array | null): number[] {
	const places = ids.flatMap((id, at) => (id === imageTokenId ? [at] : []));
	const tokens = ids.length;
	const text = {
		ids: Int32Array.from(ids, (id) => (id === imageTokenId ? -1 : id)),
		labels: new Int32Array(tokens),
		lossMask: new Float32Array(tokens),
		lengths: [tokens],
	};
	using input = new DeviceInput(device, text, model.parallel);
	const addToEmbedding = (embedded: Tensor) => {
		const values = embedded.toFloat32();
		for (const [row, at] of places.entries()) {
			for (let i = 0; i < 32; i++) values[at * 32 + i]! += images![row * 32 + i]!;
		}
		return Tensor.from(device, values, [tokens, 32]);
	};
	const forward = { ...input.forward(0, TokenSlice.of(0, tokens)), ...(images ? { addToEmbedding } : {}) };
	using logits = model.chunks[0]!.forward(new Tape(device, { recording: false }), forward, null);
	const values = logits.toFloat32();
	return Array.from({ length: tokens }, (_, token) => {
		const own = values.subarray(token * logits.width, token * logits.width + 61);
		return own.indexOf(Math.max(...own));
	});
}

const alone = groupOfOne("language", 0);
const ranks = { group: alone, stages: alone, edges: new Map() };
const limits = { endIds: [5], most: 12 };

function continueGreedily(prompts: Prompts): readonly (readonly number[])[] {
	return decode(model, prompts, { ...limits, sampling: greedy }, ranks).ids;
}

/** Throws unless `continued` is what greedy decoding of `prompt` must give. */
function check(prompt: readonly number[], continued: readonly number[], images: Float32Array | null): void {
	const next = likeliest([...prompt, ...continued], images).slice(prompt.length - 1);
	expect(next.slice(0, continued.length)).toEqual([...continued]);
	if (continued.length < limits.most) expect(next[continued.length]).toBe(limits.endIds[0]!);
}

test("prompts of different lengths together go on as each alone", () => {
	const prompts = Array.from({ length: 8 }, (_, index) =>
		Array.from({ length: 1 + index }, (_, at) => (7 * index + 3 * at + 1) % 60),
	);
	const continued = continueGreedily({ ids: prompts, rows: null, imageTokenId: -1 });
	for (const [index, prompt] of prompts.entries()) check(prompt, continued[index]!, null);
	// Otherwise this would show little.
	expect(new Set(continued.map((ids) => ids.join())).size).toBeGreaterThan(3);
});

test("image rows stand where the image tokens are", () => {
	const prompts = [
		[imageTokenId, imageTokenId],
		[imageTokenId, 4],
		[8, imageTokenId, imageTokenId, imageTokenId],
	];
	const values = randomValues(6 * 32, 9);
	using rows = Tensor.from(device, values, [6, 32]);
	const continued = continueGreedily({ ids: prompts, rows, imageTokenId });
	let first = 0;
	for (const [index, prompt] of prompts.entries()) {
		const count = prompt.filter((id) => id === imageTokenId).length;
		check(prompt, continued[index]!, values.subarray(first * 32, (first + count) * 32));
		first += count;
	}
});

test("tokens are told as they arise, and an end token ends a sequence and is not told", () => {
	const told: number[][] = [[], []];
	const prompts = { ids: [[3, 1, 4], [15]], rows: null, imageTokenId: -1 };
	const onToken = (sequence: number, id: number) => told[sequence]!.push(id) > 0;
	const options = { ...limits, sampling: greedy, onToken };
	const { ids, times } = decode(model, prompts, options, ranks);
	expect(told).toEqual(ids.map((own) => [...own]));
	expect(times.prefill.tokens).toBe(4);
	// Every token but the first of each sequence, and every end, took a step.
	const ended = ids.filter((own) => own.length > 0 && own.length < limits.most).length;
	const first = ids.filter((own) => own.length > 0).length;
	expect(times.decode.tokens).toBe(ids.flat().length - first + ended);
	const second = ids[0]![1]!;
	const cut = decode(model, prompts, { ...options, endIds: [5, second] }, ranks).ids;
	expect(cut[0]).toEqual(ids[0]!.slice(0, ids[0]!.indexOf(second)));
	// A sequence that is told to stop keeps the token; the other goes on.
	const stopped = decode(model, prompts, { ...options, onToken: (sequence) => sequence === 1 }, ranks).ids;
	expect(stopped).toEqual([ids[0]!.slice(0, 1), [...ids[1]!]]);
});

test("drawn tokens follow the seed and the number of the sequence, not the batch", () => {
	const sampling: SamplingOptions = { temperature: 1, topK: 20, topP: 0.95, seed: 7 };
	const draw = (ids: number[][], numbers: number[], seed = 7) =>
		decode(model, { ids, rows: null, imageTokenId: -1, numbers }, { ...limits, sampling: { ...sampling, seed } }, ranks)
			.ids;
	const prompt = [3, 1, 4];
	const together = draw([prompt, prompt, [9]], [0, 1, 2]);
	expect(together[0]).not.toEqual(together[1]!);
	expect(draw([prompt], [1])).toEqual([together[1]!]);
	expect(draw([[9], prompt], [2, 0])).toEqual([together[2]!, together[0]!]);
	expect(draw([prompt], [1], 8)).not.toEqual([together[1]!]);
});
