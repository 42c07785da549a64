import { expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { countFlopsPerToken, countParameters, megatronFlopsPerStep } from "../../../src/models/language/counts.ts";

const twenty = configurationOf({ preset: "nemotron-20l" });
const large = configurationOf({ preset: "nemotron-54l" });
const nano = configurationOf({ preset: "nemotron-nano-30b-a3b", "train-iters": 1 });

test("parameters of a layer", () => {
	/** All parameters and the active ones of a model that is this layer and the final norm. */
	const layer = (preset: string, symbol: string) => {
		const c = configurationOf({ preset, "hybrid-layer-pattern": symbol, "train-iters": 1 });
		const { total, active, embedding, output } = countParameters(c);
		return [total - embedding - output - c.hiddenSize, active - c.hiddenSize];
	};
	expect(layer("nemotron-20l", "M")).toEqual([38_744_896, 38_744_896]);
	expect(layer("nemotron-20l", "*")).toEqual([27_527_808, 27_527_808]);
	expect(layer("nemotron-nano-30b-a3b", "*")).toEqual([23_399_040, 23_399_040]);
	expect(layer("nemotron-20l", "E")).toEqual([1_297_468_032, 80_169_600]);
	const { embedding, output } = countParameters(twenty);
	expect([embedding, output]).toEqual([352_321_536, 352_321_536]);
});

test("parameters of the published models", () => {
	for (const [configuration, total, active] of [
		[twenty, 11_515_677_504, 1_072_646_976],
		[large, 31_657_765_568, 2_955_258_560],
		[nano, 31_577_937_344, 2_875_430_336],
	] as const) {
		const counts = countParameters(configuration);
		expect(counts.total).toBe(total);
		expect(counts.active).toBe(active);
	}
	const counts = countParameters(nano);
	expect(counts.active + counts.output).toBe(3_227_751_872);
	expect(counts.active + counts.output + counts.embedding).toBe(3_580_073_408);
});

test("parameters of Qwen3-Next-80B-A3B, of which three billion are active", () => {
	const { total, active } = countParameters(
		configurationOf({ preset: "qwen3-next-80b-a3b", "train-iters": 1, lr: 1e-4 }),
	);
	expect([total, active]).toEqual([79_674_391_296, 3_252_599_552]);
});

test("a tied output layer has no parameters of its own; a gate is half of fc1", () => {
	const base = { preset: "nemotron-tiny", "hybrid-layer-pattern": "-" };
	const plain = countParameters(configurationOf(base));
	const tied = countParameters(configurationOf({ ...base, "untie-embeddings-and-output-weights": false }));
	expect(plain.total - tied.total).toBe(plain.embedding);
	const gated = configurationOf({ ...base, "squared-relu": false, swiglu: true });
	const norms = 2 * gated.hiddenSize;
	expect(countParameters(gated).active - norms).toBe(3 * gated.hiddenSize * gated.ffnHiddenSize);
});

test("operations per token of a layer", () => {
	const { layer, logits } = countFlopsPerToken(twenty);
	expect(layer.mamba).toBe(80_871_424);
	expect(layer.attention).toBe(122_159_104);
	expect(layer.moe).toBe(160_333_824);
	expect(logits).toBe(704_643_072);
});

test("operations per token of the published models", () => {
	for (const [configuration, forward, both] of [
		[twenty, 3.0816, 9.2449],
		[large, 7.2296, 21.6889],
		[nano, 6.9358, 20.8073],
	] as const) {
		const counts = countFlopsPerToken(configuration);
		expect((counts.forward / 1e9).toFixed(4)).toBe(forward.toFixed(4));
		expect((counts.forwardBackward / 1e9).toFixed(4)).toBe(both.toFixed(4));
	}
});

test("Megatron's count", () => {
	expect(megatronFlopsPerStep(twenty).toExponential(6)).toBe("6.437265e+14");
	const many = configurationOf({ preset: "nemotron-20l", "global-batch-size": 768 });
	expect(megatronFlopsPerStep(many).toExponential(6)).toBe("6.179774e+16");
	const perToken = (c: typeof twenty) => megatronFlopsPerStep(c) / c.globalBatchSize / c.seqLength / 1e9;
	expect(perToken(twenty).toFixed(4)).toBe("9.8225");
	expect(perToken(nano).toFixed(4)).toBe("22.2781");
});
