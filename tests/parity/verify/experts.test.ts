/** Gated experts with biases, as one operation and one after the other, train the same on every layout. */
import { afterAll, describe, expect, test } from "bun:test";
import { namedTopology, parseLayout } from "../../../src/parallel/layout.ts";
import { World } from "../../../src/parallel/world.ts";
import { planOf } from "../../../src/parity/verify/plan.ts";
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

const gated = {
	"hybrid-layer-pattern": "E*-E",
	"squared-relu": false,
	swiglu: true,
	"activation-func-clamp-value": 1.5,
	"add-bias-linear": true,
	"moe-shared-expert-intermediate-size": 0,
	"moe-mlp-glu-interleave-size": 8,
	"delay-wgrad-compute": true,
};

describe("layouts give what one process gives", () => {
	const quick = [["1+tp2ep2", {}]] as const;
	const all = [
		["1+dp2ep2", { "moe-fused-mlp": "off", "recompute-granularity": "full" }],
		["1+tp2ep2", { swiglu: false, "quick-geglu": true, "glu-linear-offset": 1 }],
		["2+dp4ep4", { "hybrid-layer-pattern": "[*E][*E]" }],
		["1+tp2ep1etp2", { "add-bias-linear": false, "moe-mlp-glu-interleave-size": null }],
	] as const;
	for (const [layout, keys] of process.env.MIMO_TEST_FULL === "1" ? [...quick, ...all] : quick) {
		test(`${layout} ${JSON.stringify(keys)}`, async () => {
			const changes = { ...gated, ...keys };
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
					for (const { exitCode, stderr } of outcomes)
						expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
					return 0;
				},
			});
			const { failures, result, verdict } = reports[0]!;
			expect(failures).toEqual([]);
			expect(result).toMatchObject({ reordered: { gradients: 0, weights: 0 } });
			const names = verdict!.gradients.map(({ name }) => name).join("\n");
			const biases = ["experts.linear_fc1.bias7", "experts.linear_fc2.bias0", "router.bias", "linear_qkv.bias"];
			for (const part of changes["add-bias-linear"] ? biases : []) expect(names).toContain(part);
		}, 60_000);
	}
});
