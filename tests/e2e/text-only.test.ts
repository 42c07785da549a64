/** Pictures of many sizes and samples of text alone, on grids that cut both modules: some encoder ranks see no image. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { captions, Scratch } from "../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
beforeAll(() => {
	captions(scratch, "pictures", [20]);
	const facts = Array.from({ length: 60 }, (_, i) => JSON.stringify({ text: `fact ${i} ${"x".repeat(i % 30)}` }));
	scratch.file("facts.jsonl", `${facts.join("\n")}\n`);
	expect(mimo(["data", "prepare", "facts.jsonl"], scratch.path).exitCode).toBe(0);
	const items = "      - path: pictures\n        weight: 1\n      - path: facts.jsonl\n        weight: 3\n";
	const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n";
	scratch.file("blend.yaml", head + items);
});

const common = [
	...["--preset", "nemotron-vlm-tiny", "--data-path", "blend.yaml", "--seq-length", "64", "--train-iters", "4"],
	...["--micro-batch-size", "1", "--global-batch-size", "4", "--lr-warmup-iters", "1", "--log-interval", "1"],
	...["--data-threads", "1", "--adam-eps", "1e-6", "--threads", "1", ...deviceFlags.split(" ")],
];

type Step = Readonly<
	Record<"lm loss" | "grad_norm" | "grad_norm_exact" | "grad_norm_corrected" | "encoder_participants", number>
>;

function steps(name: string, ...flags: string[]): Step[] {
	const { exitCode, stderr } = mimo(["train", ...common, "--log-json", `${name}.jsonl`, ...flags], scratch.path);
	expect([name, exitCode, exitCode === 0 ? "" : stderr]).toEqual([name, 0, ""]);
	const lines = readFileSync(join(scratch.path, `${name}.jsonl`), "utf8")
		.trim()
		.split("\n");
	return lines.map((line) => JSON.parse(line) as Step).filter((record) => record["lm loss"] !== undefined);
}

test("tp2dp2 + tp2dp2ep2 trains what one process trains, and counts who saw images", () => {
	const grids = ["--encoder-tp", "2", "--encoder-dp", "2", "--llm-tp", "2", "--llm-dp", "2", "--llm-ep", "2"];
	const alone = steps("alone", "--llm-offset", "0", "--num-workers", "4");
	const exact = steps("exact", ...grids);
	expect(exact).toHaveLength(4);
	for (const [index, step] of exact.entries()) {
		expect(Math.abs(step["lm loss"] / alone[index]!["lm loss"] - 1)).toBeLessThan(2e-6);
		expect(Math.abs(step.grad_norm / alone[index]!.grad_norm - 1)).toBeLessThan(1e-5);
		expect(step.grad_norm_exact).toBe(step.grad_norm);
		const some = step.encoder_participants === 1;
		expect(step.grad_norm_corrected > step.grad_norm_exact).toBe(some);
	}
	// The data are such that all cases are met.
	const participants = exact.map((step) => step.encoder_participants);
	expect(participants.some((count) => count < 2)).toBeTrue();
	expect(participants.some((count) => count > 0)).toBeTrue();

	// The correction changes the gradient exactly where one of two encoder lanes saw images, and no loss before.
	const corrected = steps("corrected", ...grids, "--encoder-grad-participation", "corrected");
	const first = participants.indexOf(1);
	expect(first).toBeGreaterThanOrEqual(0);
	for (let index = 0; index <= first; index++) {
		expect(corrected[index]!["lm loss"]).toBe(exact[index]!["lm loss"]);
	}
	const [changed, unchanged] = [corrected[first]!, exact[first]!];
	expect(changed.grad_norm).toBe(changed.grad_norm_corrected);
	expect(Math.abs(changed.grad_norm_corrected / unchanged.grad_norm_corrected - 1)).toBeLessThan(1e-5);
	expect(Math.abs(changed.grad_norm_exact / unchanged.grad_norm_exact - 1)).toBeLessThan(1e-5);
}, 120_000);

test("a step of text alone runs the collectives of one with pictures, sends and computes less, and so holds up no rank", () => {
	/** How often ranks call the native library in two steps, by name; "encoder": all calls of encoder ranks. */
	const callsOf = (data: string) => {
		const grids = "--encoder-dp 2 --llm-dp 2 --encoder-balance number --train-iters 2".split(" ");
		const own = [...common, ...grids].map((flag) => (flag === "blend.yaml" ? data : flag));
		const { exitCode, stderr } = mimo(["train", ...own], scratch.path, { MIMO_DEBUG: "4" });
		expect(exitCode).toBe(0);
		const count = (pattern: RegExp) => stderr.match(pattern)?.length ?? 0;
		const collectives = ["all_gather", "all_reduce", "reduce_scatter", "exchange"];
		return {
			collectives: collectives.map((name) => count(new RegExp(`mimo_group_${name}\\b`, "g"))),
			sent: count(/mimo_group_send\b/g),
			encoder: count(/^\[rank \d+ radio_encoder\]/gm),
		};
	};
	const [text, pictures] = [callsOf("facts.jsonl"), callsOf("pictures")];
	expect(text.collectives).toEqual(pictures.collectives);
	expect(Math.min(...text.collectives)).toBeGreaterThan(0);
	expect(text.sent).toBeLessThan(pictures.sent);
	expect(2 * text.encoder).toBeLessThan(pictures.encoder);
}, 120_000);
