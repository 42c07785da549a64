/** An elastic model trains the same on every layout; a router's gradient that is lost is found. */
import { afterAll, describe, expect, spyOn, test } from "bun:test";
import { TableLayout } from "../../../src/elastic/tables.ts";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { World } from "../../../src/parallel/world.ts";
import { planOf } from "../../../src/parity/verify/plan.ts";
import type { LayoutReport } from "../../../src/parity/verify/report.ts";
import { VerifyFolder, verify } from "../../../src/parity/verify/verify.ts";
import { runRanks } from "../../parallel/ranks.ts";
import { testDevice } from "../../support.ts";
import { smallSubject } from "./subject.ts";

const device = await testDevice(1);
const alone = World.alone(device);
const folder = new VerifyFolder();
afterAll(() => {
	folder[Symbol.dispose]();
	device[Symbol.dispose]();
});

const elastic = {
	flextron: true,
	"enable-router": true,
	"mamba-num-groups": 2,
	"emb-int-list": [32, 24, 16],
	"mamba-int-list": [4, 2],
	"mlp-int-list": [24, 12],
	"moe-expert-int-list": [8, 6, 4],
	"head-int-list": [4, 2],
	"budget-list": [1, 0.7],
	"router-inter-dim": 8,
	"router-std": 0.4,
	"moe-router-bias-update-rate": 0,
};
const soft = {
	"soft-mask": true,
	"moe-router-score-function": "sigmoid",
	"moe-router-load-balancing-type": ["none"],
	"moe-aux-loss-coeff": [0],
};
const skipping = { "add-skipping": true, "layer-ranking-list": [3, 1] };
const byLayer = { "flex-hetero-mamba": true, "flex-hetero-ffn": true, "flex-hetero-moe-expert": true };

async function reportOf(layout: string, keys: Readonly<Record<string, unknown>>): Promise<LayoutReport> {
	const changes = { ...elastic, ...keys };
	const subject = smallSubject(changes);
	const { reports } = await verify({
		subject,
		plans: [planOf(namedTopology(parseLayout(layout)), { ...subject, samples: subject.samples.length })],
		folder: folder.path,
		tolerance: 1e-5,
		alone,
		launch: async ({ name, topology }) => {
			const args = [folder.path, name, JSON.stringify(changes)];
			const outcomes = await runRanks("../parity/verify/verify-rank.ts", topology.worldSize, args);
			for (const { exitCode, stderr } of outcomes) expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
			return 0;
		},
	});
	return reports[0]!;
}

describe("layouts give what one process gives", () => {
	const cut = { "hybrid-layer-pattern": "ME|*-" };
	for (const [layout, keys] of [
		["1", soft],
		["1+tp2", { ...soft, ...skipping, "recompute-granularity": "full", "recompute-num-layers": 2 }],
		["2|pp2", { ...soft, ...byLayer, ...cut }],
		["1+dp2ep2", { "freeze-model": true }],
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
