/** Losses beside the language model's are compared: of MTP depths, of budgets, of divergence from a teacher. */
import { afterAll, expect, spyOn, test } from "bun:test";
import { distillationLossName } from "../../../src/guests/distillation/distillation.ts";
import { budgetLossName } from "../../../src/guests/elastic/elastic.ts";
import { depthLoss } from "../../../src/guests/mtp/mtp.ts";
import { Losses } from "../../../src/train/losses.ts";
import { softMasks } from "../../guests/elastic/family-model.ts";
import { elasticKeys } from "./elastic-keys.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

for (const [loss, factor, keys] of [
	[depthLoss(0), 0, { "hybrid-layer-pattern": "M*/E" }],
	[budgetLossName, 2, { ...elasticKeys, ...softMasks }],
	[distillationLossName, 1.001, { "export-kd-teacher-load": "teacher", "freeze-vit": true, "freeze-projection": true }],
] as const) {
	test(`${loss} that is logged times ${factor} is found, and nothing else`, async () => {
		const { totals } = Losses.prototype;
		let plant: ReturnType<typeof spyOn> | null = null;
		const change = () => {
			plant = spyOn(Losses.prototype, "totals").mockImplementation(function (this: Losses, world) {
				const right = totals.call(this, world);
				const { sum, tokens } = right.get(loss)!;
				return new Map([...right, [loss, { sum: factor * sum, tokens }]]);
			});
		};
		try {
			const { failures } = await run.reportOf("1", keys, change);
			expect(plant).toHaveBeenCalled();
			expect(failures).toEqual([expect.stringMatching(new RegExp(`^${loss} is off by [\\d.e+-]+ \\(limit `))]);
		} finally {
			plant!.mockRestore();
		}
	}, 60_000);
}
