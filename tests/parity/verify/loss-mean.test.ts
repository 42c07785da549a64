/** Without --calculate-per-token-loss, on samples with unequally many loss tokens, layouts train as one process does. */
import { afterAll, expect, test } from "bun:test";
import { lossTokens } from "../../../src/data/microbatch.ts";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { referencePlan } from "../../../src/parity/verify/reference.ts";
import { planOf, requireEqualMicrobatches } from "../../../src/parity/verify/samples.ts";
import { poolingReason } from "../../../src/parity/verify/subject.ts";
import { elasticKeys } from "./elastic-keys.ts";
import { SmallRun } from "./small-run.ts";
import { smallSubject } from "./subject.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const means = {
	"calculate-per-token-loss": false,
	"moe-router-load-balancing-type": ["seq_aux_loss", "aux_loss"],
	"moe-aux-loss-coeff": [1e-2, 1e-2],
	"moe-z-loss-coeff": 1e-2,
};
const text = { "llm-only": true, "hybrid-layer-pattern": "ME|*-/*E/*E" };

const quick = [
	["tp2", text],
	["dp2", { ...text, "mtp-use-repeated-layer": true }],
	["pp2", text],
	["2+dp4ep2", { "delay-wgrad-compute": true }],
	["dp2|tp2", elasticKeys],
] as const;
const more = [
	["dp2ep2", text],
	["1+tp2", {}],
] as const;

for (const [layout, keys] of process.env.MIMO_TEST_FULL === "1" ? [...quick, ...more] : quick) {
	test(`${layout} ${JSON.stringify(keys)}`, async () => {
		const report = await run.reportOf(layout, { ...means, ...keys });
		expect(report.failures).toEqual([]);
		expect(report.microBatchSize).toBe(2);
		expect(report.result!.zero).toEqual({ gradients: 0, weights: 0 });
	}, 60_000);
}

test("samples differ in their loss tokens, so a layout with other microbatches is refused", () => {
	const subject = smallSubject({ ...means, ...text });
	expect(new Set(subject.samples.map((sample) => lossTokens(sample.text))).size).toBeGreaterThan(4);
	const plan = planOf(namedTopology(parseLayout("dp8")), { ...subject, samples: subject.samples.length });
	expect(() => requireEqualMicrobatches(plan, referencePlan(subject), poolingReason(subject)!)).toThrow(
		"Layout dp8 needs microbatches of 1 sample instead of 2: results depend on it, because without calculate-per-token-loss a token weighs the less, the more loss tokens its microbatch has.",
	);
	expect(poolingReason(smallSubject({ "llm-only": true }))).toBeNull();
});
