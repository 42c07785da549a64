/** Attention with sinks, in windows of some layers, and what else Gemma has, train the same on every layout. */
import { afterAll, expect, test } from "bun:test";
import { recomputeModuleNames } from "../../../src/config/recompute-modules.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const windows = {
	...{ "hybrid-layer-pattern": "*-|*E", "window-size": [4, 0], "window-attn-skip-freq": [1, 0, 0, 0] },
	"softmax-type": "learnable",
};
const gemma = {
	...{ "position-embedding-type": "rope", "rotary-base-local": 100, "rotary-seq-len-interpolation-factor": 2 },
	...{ "apply-layernorm-1p": true, "qk-layernorm": true, "post-layernorm": true, "softmax-scale": 0.2 },
	...{ "embedding-multiplier": 6, "embedding-padding-idx": 5, "untie-embeddings-and-output-weights": false },
	...{ "squared-relu": false, geglu: true },
};
const modules = { "recompute-granularity": "selective", "recompute-modules": recomputeModuleNames };
for (const [layout, keys] of [
	["1+tp2", { ...windows, ...gemma, ...modules }],
	["dp2|pp2", { ...windows, ...gemma }],
] as const) {
	test(`${layout} ${JSON.stringify(keys)}`, async () => {
		const { failures, result } = await run.reportOf(layout, keys);
		expect(failures).toEqual([]);
		expect(result).toMatchObject({ zero: { gradients: 0, weights: 0 } });
	}, 60_000);
}
