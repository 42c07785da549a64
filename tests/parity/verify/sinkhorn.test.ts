/** Sinkhorn's routing balances the tokens of a microbatch together, whichever ranks have them. */
import { afterAll, expect, test } from "bun:test";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const keys = {
	"moe-router-load-balancing-type": ["sinkhorn"],
	"moe-aux-loss-coeff": [0],
	"moe-router-enable-expert-bias": false,
	"moe-router-topk-scaling-factor": 1,
};
for (const [layout, more] of [
	["1+tp2", { "moe-router-topk": 1, "recompute-granularity": "full", "recompute-num-layers": 2 }],
	["2+dp2ep2", { "moe-router-topk": 2 }],
] as const) {
	test(`${layout}, ${more["moe-router-topk"]} of the experts`, async () => {
		const { failures, result } = await run.reportOf(layout, { ...keys, ...more });
		expect(failures).toEqual([]);
		expect(result).toMatchObject({ zero: { gradients: 0, weights: 0 } });
	}, 60_000);
}
