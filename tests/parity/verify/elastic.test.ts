/** An elastic model trains the same on every layout; a router's gradient that is lost is found. */
import { afterAll, describe, expect, spyOn, test } from "bun:test";
import { TableLayout } from "../../../src/guests/elastic/masks/tables.ts";
import type { LayoutReport } from "../../../src/parity/verify/verdict.ts";
import { softMasks as soft } from "../../guests/elastic/family-model.ts";
import { elasticKeys } from "./elastic-keys.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const skipping = { "add-skipping": true, "layer-ranking-list": [3, 1] };
const byLayer = { "flex-hetero-mamba": true, "flex-hetero-ffn": true, "flex-hetero-moe-expert": true };

function reportOf(layout: string, keys: Readonly<Record<string, unknown>>): Promise<LayoutReport> {
	return run.reportOf(layout, { ...elasticKeys, ...keys });
}

/** Samples and experts that three lanes share, and units that three tensor-parallel ranks share. */
const lanesOfThree = { "global-batch-size": 6, "num-experts": 6, "moe-expert-int-list": [6, 4] };
const unitsOfThree = {
	...{
		"hidden-size": 48,
		"num-attention-heads": 6,
		"num-query-groups": 3,
		"mamba-num-heads": 6,
		"mamba-num-groups": 3,
	},
	...{ "emb-int-list": [48, 32], "mamba-int-list": [6, 3], "head-int-list": [6, 3], "seq-length": 48 },
	"make-vocab-size-divisible-by": 3,
};

describe("layouts give what one process gives", () => {
	const turns = { "llm-ep": 2, "llm-tp": 2, "overlap-moe-expert-parallel-comm": true, "delay-wgrad-compute": true };
	const balanced = {
		"moe-router-load-balancing-type": ["seq_aux_loss"],
		"moe-aux-loss-coeff": [0.1],
		"moe-router-bias-update-rate": 1e-2,
	};
	const cut = { "hybrid-layer-pattern": "ME|*-" };
	const more = [
		["1", soft],
		["1+tp2", { ...soft, ...balanced }],
		["1+pp2", { ...soft, ...byLayer, "hybrid-layer-pattern": "M|E|*|-" }],
	] as const;
	for (const [layout, keys] of [
		["1+tp2", { ...soft, ...skipping, "recompute-granularity": "full", "recompute-num-layers": 2 }],
		["2|pp2", { ...soft, ...byLayer, ...cut }],
		["1+dp2ep2", { "freeze-model": true }],
		["1+tp2ep2", { ...byLayer, ...turns }],
		["dp2|pp2", { ...balanced, ...cut }],
		["1+tp2ep1etp2", { "moe-mlp-glu-interleave-size": null }],
		// Ranks that share the router's gradients, in numbers that do not divide 64.
		["1+pp3", { ...soft, "hybrid-layer-pattern": "ME|*|-" }],
		["3+dp3", { ...soft, ...lanesOfThree }],
		["1+tp3", { ...soft, ...unitsOfThree }],
		...(process.env.MIMO_TEST_FULL === "1" ? more : []),
	] as const) {
		test(layout, async () => {
			const report = await reportOf(layout, keys);
			expect(report.failures).toEqual([]);
			const { result } = report;
			const unequal = [result!.zero, ...(result!.reordered ? [result!.reordered] : [])];
			expect(unequal.every(({ gradients, weights }) => gradients === 0 && weights === 0)).toBe(true);
		}, 60_000);
	}
});

test("a mask's gradient that is lost is found", async () => {
	const add = TableLayout.prototype.addGradients;
	let calls = 0;
	using _lost = spyOn(TableLayout.prototype, "addGradients").mockImplementation(function (this: TableLayout, ...args) {
		// Three steps of the reference and its noise, of eight microbatches each.
		if (calls++ < 24) add.apply(this, args);
	});
	const { failures } = await reportOf("1", soft);
	expect(failures.join("\n")).toContain("elastic_router.");
}, 60_000);
