/** Random samples are packs: an operation that loses a border between two sequences of one is found. */
import { afterAll, expect, spyOn, test } from "bun:test";
import { Sequences } from "../../../src/tensor/sequences.ts";
import { SmallRun } from "./small-run.ts";

const run = await SmallRun.open();
afterAll(() => run[Symbol.dispose]());

test("two sequences of a sample that see each other are found", async () => {
	const { of } = Sequences;
	let plant: ReturnType<typeof spyOn> | null = null;
	const mergeTwo = () => {
		plant = spyOn(Sequences, "of").mockImplementation((device, lengths) => {
			// Of three sequences each, the first takes over the second's tokens; borders between samples stay.
			const merged = lengths.map((length, at) => [length + lengths[at + 1]!, 0, length][at % 3]!);
			return of.call(Sequences, device, merged);
		});
	};
	try {
		// Attention and Mamba alone, so that no router's statistics count sequences.
		const { failures } = await run.reportOf(
			"1",
			{ "llm-only": true, "model-provider": "nemotron-moe-vlm", "hybrid-layer-pattern": "M*-" },
			mergeTwo,
		);
		expect(plant).toHaveBeenCalled();
		expect(failures[0]).toMatch(/^the gradient of language_model\.decoder\.layers\.[01]\.\S+ is off by/);
		expect(failures.join("\n")).toContain("loss is off by");
	} finally {
		plant!.mockRestore();
	}
}, 60_000);
