/** Gated DeltaNet beside gated attention trains the same on every layout, recomputed and with adapters. */
import { afterAll, expect, test } from "bun:test";
import { recomputeModuleNames } from "../../../src/config/recompute-modules.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const model = {
	...{
		"hybrid-layer-pattern": "G-|*E",
		"attention-output-gate": true,
		"qk-layernorm": true,
		"apply-layernorm-1p": true,
	},
	...{ "linear-num-key-heads": 2, "linear-num-value-heads": 4, "linear-key-head-dim": 8, "linear-value-head-dim": 12 },
};
const modules = { "recompute-granularity": "selective", "recompute-modules": recomputeModuleNames };
const adapters = { "lora-rank": 2, "lora-target-modules": ["linear_qkv", "linear_proj", "in_proj", "out_proj"] };
for (const [layout, keys] of [
	["1+tp2", { ...model, ...modules }],
	["dp2|pp2", { ...model, ...adapters }],
] as const) {
	test(`${layout} ${Object.keys(keys).join(" ")}`, async () => {
		const { failures, result } = await run.reportOf(layout, keys);
		expect(failures).toEqual([]);
		expect(result).toMatchObject({ zero: { gradients: 0, weights: 0 } });
	}, 60_000);
}
