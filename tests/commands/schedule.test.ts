/** The table and the JSON of --print-schedule. */
import { expect, test } from "bun:test";
import { scheduleJson, scheduleTable } from "../../src/commands/topology.ts";
import { resolveConfiguration } from "../../src/config/resolve.ts";

const resolved = (flags: string) =>
	resolveConfiguration([
		"--preset",
		"nemotron-vlm-tiny",
		"--global-batch-size",
		"8",
		"--micro-batch-size",
		"2",
		...flags.split(" "),
	]);

test("an encoder ahead of two stages", () => {
	const lines = scheduleTable(resolved("--llm-pp 2 --hybrid-layer-pattern ME|*-")).split("\n");
	expect(lines.slice(1, 4).map((line) => line.trim().split(/ {2,}/).join(" "))).toEqual([
		"radio_encoder 0 Fe0 Fe1 Fe2 Fe3 . . . Be0 - . Be1 - . Be2 - . Be3 -",
		"stage 0 1 . F0 F1 . . B0 - F2 B1 - F3 B2 - . B3 - . .",
		"stage 1 2 . . F0 B0 - F1 B1 - F2 B2 - F3 B3 - . . . .",
	]);
});

test("late weight gradients fill the time in which stages wait", () => {
	const table = scheduleTable(resolved("--llm-pp 2 --hybrid-layer-pattern ME|*- --delay-wgrad-compute"));
	const lines = table.split("\n");
	expect(lines.slice(1, 4).map((line) => line.trim().split(/ {2,}/).join(" "))).toEqual([
		"radio_encoder 0 Fe0 Fe1 Fe2 Fe3 . Be0 - . Be1 - . Be2 - Be3 -",
		"stage 0 1 . F0 F1 . B0 W0 F2 B1 W1 F3 B2 W2 B3 W3 .",
		"stage 1 2 . . F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3 .",
	]);
	expect(table).toContain("W: weight gradients that backward has delayed");
	// A frozen language model has none.
	expect(
		scheduleTable(resolved("--llm-pp 2 --hybrid-layer-pattern ME|*- --delay-wgrad-compute --freeze-lm")),
	).not.toContain("W0");
});

test("JSON has every action with its slots", () => {
	const json = JSON.parse(
		scheduleJson(resolved("--llm-pp 2 --llm-offset 0 --encoder-dp 2 --hybrid-layer-pattern ME|*-")),
	);
	expect(json.shape).toEqual({
		...{ pipeline: "language", stages: 2, virtualStages: 1, groupSize: 2, microbatches: 4, forwardOnly: false },
		lateWeightGradients: false,
		overlap: null,
		encoders: [{ name: "radio_encoder", colocated: true, trains: [true] }],
	});
	expect(json.actors.map(({ ranks }: { ranks: number[] }) => ranks)).toEqual([[0], [1]]);
	expect(json.actors[1].actions[0]).toEqual({
		...{ begin: 0, end: 1 },
		action: { kind: "forward", chunk: { module: "radio_encoder", index: 0 }, microbatch: 0 },
	});
	const kinds = new Set(json.actors[0].actions.map(({ action }: { action: { kind: string } }) => action.kind));
	expect([...kinds].sort()).toEqual(["backward", "forward", "receive", "reduce", "send"]);
});
