/** Context parallelism: every kind of layer that mixes tokens, an encoder's rows, and depths of multi-token prediction. */
import { afterAll, expect, test } from "bun:test";
import { recomputeModuleNames } from "../../../src/config/recompute-modules.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const delta = {
	...{ "linear-num-key-heads": 2, "linear-num-value-heads": 4, "linear-key-head-dim": 8, "linear-value-head-dim": 12 },
	...{
		"hybrid-layer-pattern": "G-|*E",
		"attention-output-gate": true,
		"qk-layernorm": true,
		"apply-layernorm-1p": true,
	},
};
const modules = { "recompute-granularity": "selective", "recompute-modules": recomputeModuleNames };
for (const [layout, keys] of [
	["1+cp2", { "mtp-num-layers": 1, "hidden-dropout": 0.1, "attention-dropout": 0.1 }],
	["2|cp2", { ...delta, ...modules }],
	["2|cp2", { "softmax-type": "learnable", "window-size": [5, 0], "position-embedding-type": "rope" }],
] as const) {
	test(`${layout} ${Object.keys(keys).join(" ")}`, async () => {
		const { failures, result } = await run.reportOf(layout, keys);
		expect(failures).toEqual([]);
		expect(result).toMatchObject({ zero: { gradients: 0, weights: 0 } });
	}, 60_000);
}
