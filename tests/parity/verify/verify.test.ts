/** Layouts of several processes against one process: they agree to rounding, and differences are noticed and named. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { World } from "../../../src/parallel/world.ts";
import { planOf } from "../../../src/parity/verify/samples.ts";
import type { LayoutReport } from "../../../src/parity/verify/verdict.ts";
import { renderLayouts, renderReference } from "../../../src/parity/verify/verdict.ts";
import { VerifyFolder, verify } from "../../../src/parity/verify/verify.ts";
import { runRanks } from "../../parallel/ranks.ts";
import { testDevice } from "../../support.ts";
import { smallSubject } from "./subject.ts";

const device = await testDevice(1);
const alone = World.alone(device);
let folder: VerifyFolder;
beforeAll(() => {
	folder = new VerifyFolder();
});
afterAll(() => {
	folder[Symbol.dispose]();
	device[Symbol.dispose]();
});

const full = process.env.MIMO_TEST_FULL === "1";

/** Verifies a layout whose ranks draw weights and samples from `seed`; the reference's is 1234. */
async function reportOf(layout: string, seed = 1234, tolerance = 1e-5): Promise<LayoutReport> {
	const subject = smallSubject();
	const { reference, reports } = await verify({
		subject,
		plans: [planOf(namedTopology(parseLayout(layout)), { ...subject, samples: subject.samples.length })],
		folder: folder.path,
		tolerance,
		alone,
		launch: async ({ name, topology }) => {
			const outcomes = await runRanks("../parity/verify/verify-rank.ts", topology.worldSize, [
				folder.path,
				name,
				JSON.stringify({ seed }),
			]);
			for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
			return 0;
		},
	});
	expect(renderReference(subject, reference)).toContain(
		"8 samples of 64 tokens drawn from seed 1234, 3 of them text alone",
	);
	expect(reference.noiseFlips).toBe(0);
	return reports[0]!;
}

describe("layouts that give what one process gives", () => {
	const quick = ["1", "1+tp2", "4+2", "2+dp4ep2", "pp2+pp2"];
	const all = [
		"1+1",
		"tp2pp2+tp2pp2ep2",
		"tp2+tp2ep2",
		"dp2+dp2ep2",
		"tp2dp2+tp2dp2ep2",
		"4+1",
		"1+tp2dp2ep2etp2",
		"tp4+dp4ep4",
	];
	for (const layout of full ? [...quick, ...all] : quick) {
		test(layout, async () => {
			const report = await reportOf(layout);
			expect(report.failures).toEqual([]);
			const { result, verdict } = report;
			expect(result!.scalars.tokens).toBeGreaterThan(100);
			expect(verdict!.updatesDifferent).toBe(0);
			expect(result!.zero).toEqual({ gradients: 0, weights: 0 });
			// The encoder's, the projector's and the language model's parameters, and every expert.
			const names = verdict!.gradients.map(({ name }) => name).join("\n");
			for (const part of ["embedder", "projection", "router.weight", "experts.linear_fc1.weight7", "mixer.A_log"]) {
				expect(names).toContain(part);
			}
			expect(renderLayouts([report])).toEndWith("The layout gives what one process gives.");
		}, 60_000);
	}
});

test("another model is noticed: gradients, flipped routing and ends in FAILED", async () => {
	const report = await reportOf("1+1", 77);
	expect(report.failures.join("\n")).toMatch(
		/routing decisions flip, first in layer 1: token \d+ of the batch goes to experts \d, \d instead of \d, \d;/,
	);
	expect(report.failures.join("\n")).toMatch(/the gradient of \S+ is off by \S+ \(limit 1\.0e-5\)/);
	expect(report.failures.join("\n")).toContain("after the optimizer alone is off by");
	expect(renderLayouts([report])).toEndWith("FAILED: 1+1.");
}, 60_000);
