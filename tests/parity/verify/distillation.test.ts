/** Distillation gives every layout what it gives one process: from a frozen teacher, and from the model itself at full size. */
import { afterAll, describe, expect, spyOn, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import * as distillation from "../../../src/guests/distillation/teacher.ts";
import { softMasks } from "../../guests/elastic/family-model.ts";
import { elasticKeys } from "./elastic-keys.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

const frozen = { "export-kd-teacher-load": "teacher", "export-kd-temperature": 2, "export-kd-alpha": 0.7 };
const alone = { ...frozen, "llm-only": true };
const encoder = { "freeze-vit": true, "freeze-projection": true };
// Every microbatch of a step draws the same budget: one that is not the parent's learns from the parent.
const self = { ...elasticKeys, "self-distillation": true, "original-model-sample-prob": 0, "budget-list": [0.7] };
const file = join(mkdtempSync(join(tmpdir(), "mimo-teacher-")), "teacher.yaml");
writeFileSync(file, "hybrid_layer_pattern: M*E-\nhidden_size: 48\nffn_hidden_size: 40\n");
afterAll(() => rmSync(dirname(file), { recursive: true }));
// Four segments of the student's six layers, and of the teacher's four.
const uneven = { "hybrid-layer-pattern": "M|E-*||M-" };
const cut = { "hybrid-layer-pattern": "ME|*-" };
const settings = (name: string, lines: readonly string[]) => {
	const path = join(dirname(file), `${name}.yaml`);
	writeFileSync(path, `${lines.join("\n")}\n`);
	return { "export-kd-teacher-load": "teacher", "export-kd-cfg": path };
};
const pairs = settings("pairs", [
	"logit_kl_temperature: 2",
	"intermediate_layer_pairs:",
	"  - [decoder.layers.0.norm, decoder.layers.0.norm]",
	"  - [decoder.layers.1, decoder.layers.1, mse]",
	"  - [decoder.layers.3.pre_mlp_layernorm, decoder.layers.0]",
	"  - [decoder.final_layernorm, decoder.final_norm]",
]);
// The teacher's third layer comes to the student's first stage; the language model's loss stays.
const across = settings("across", [
	"skip_lm_loss: false",
	"kd_loss_scale: 3",
	"intermediate_layer_pairs: [[decoder.layers.1, decoder.layers.2], [decoder.layers.2, decoder.layers.0]]",
]);

describe("layouts give what one process gives", () => {
	const more = [
		["a frozen teacher of an elastic model", "tp2ep2", { ...alone, ...elasticKeys, ...softMasks }],
		["the model itself", "2|tp2", self],
	] as const;
	for (const [what, layout, keys] of [
		["a frozen teacher", "dp2", alone],
		["a frozen teacher", "tp2", { ...alone, "untie-embeddings-and-output-weights": false }],
		["a frozen teacher of other sizes", "tp2", { ...alone, "export-kd-teacher-model-config": file }],
		["a frozen teacher of other sizes", "pp2", { ...alone, ...uneven, "export-kd-teacher-model-config": file }],
		["a frozen teacher", "pp2", { ...alone, ...cut, "untie-embeddings-and-output-weights": false }],
		["a frozen teacher of interleaved stages", "pp2", { ...alone, "hybrid-layer-pattern": "M|E|*|-" }],
		["a frozen teacher of an elastic model", "1+pp2", { ...frozen, ...encoder, ...elasticKeys, ...softMasks, ...cut }],
		["layers in between", "tp2", { ...pairs, "llm-only": true, ...cut }],
		["layers in between, and the labels", "pp2", { ...across, "llm-only": true, ...cut }],
		[
			"layers in between of interleaved stages",
			"tp2pp2",
			{ ...pairs, "llm-only": true, "hybrid-layer-pattern": "M|E|*|-" },
		],
		["layers in between of an elastic model", "1+pp2", { ...pairs, ...encoder, ...elasticKeys, ...softMasks, ...cut }],
		[
			"the model itself and its layers in between",
			"1+pp2",
			{ ...self, "export-kd-cfg": pairs["export-kd-cfg"], ...cut },
		],
		["the model itself", "1+tp2pp2", { ...self, ...cut, ...softMasks }],
		...(process.env.MIMO_TEST_FULL === "1" ? more : []),
	] as const) {
		test(`${what}: ${layout}`, async () => {
			const report = await run.reportOf(layout, keys);
			expect(report.failures).toEqual([]);
		}, 60_000);
	}
});

test("another temperature is found", async () => {
	let calls = 0;
	const loss = distillation.distillationLoss;
	using _other = spyOn(distillation, "distillationLoss").mockImplementation((tape, teacher, ...rest) =>
		// Three steps of the reference and its noise, of eight microbatches each.
		loss(tape, calls++ < 24 ? teacher : { ...teacher, temperature: 4 }, ...rest),
	);
	const { failures } = await run.reportOf("1", { ...frozen, ...encoder });
	expect(failures.join("\n")).toContain("the gradient of");
}, 60_000);
