import { afterAll, beforeEach, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { formatName, latestName } from "../../../src/checkpoint/native/manifest.ts";
import { NativeSave } from "../../../src/checkpoint/native/writer.ts";
import { requireOwnSteps } from "../../../src/checkpoint/training/choose-checkpoint.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-own-steps-"));
afterAll(() => rmSync(folder, { recursive: true }));
const save = join(folder, "save");
beforeEach(() => rmSync(save, { recursive: true, force: true }));

/** Checkpoints without tensors; `latest.json` names the last one. */
async function write(lineage: string | null, ...iterations: readonly (number | null)[]): Promise<void> {
	for (const iteration of iterations) {
		await NativeSave.begin(save, iteration).publish([], { generator: "test", model: {}, common: { lineage } });
	}
}

const start = { path: save, iteration: null, finetune: false };
const beside = (names: string) =>
	`--save ${save} holds ${names}, which this run neither loads nor has written: --load ${save} goes on from the newest, --save-over lets this run`;

test("an empty or absent folder is accepted; a folder with checkpoints belongs to the training that resumes from it", async () => {
	expect(requireOwnSteps(save, null)).toEqual([]);
	await write("a", 4, 8);
	expect(() => requireOwnSteps(save, null)).toThrow(beside("iter_0000004 and iter_0000008"));
	expect(requireOwnSteps(save, start)).toEqual(["iter_0000004", "iter_0000008"]);
	expect(requireOwnSteps(save, { ...start, path: `${save}/../save/` })).toEqual(["iter_0000004", "iter_0000008"]);
	expect(requireOwnSteps(save, { ...start, path: join(save, "iter_0000008") })).toHaveLength(2);
	await write("a", 12, 16);
	expect(() => requireOwnSteps(save, null)).toThrow(beside("iter_0000004 to iter_0000016 (4 checkpoints)"));
});

test("a training that starts from weights, or from another folder, does not own the checkpoints", async () => {
	await write("a", 4, 8);
	expect(() => requireOwnSteps(save, { ...start, finetune: true })).toThrow("holds iter_0000004, which");
	expect(() => requireOwnSteps(save, { ...start, path: folder })).toThrow(beside("iter_0000004 and iter_0000008"));
	rmSync(save, { recursive: true });
	await write(null, null);
	expect(requireOwnSteps(save, { ...start, finetune: true })).toEqual(["release"]);
});

test("newer checkpoints are the run's where the same training wrote them", async () => {
	await write("a", 4, 8);
	await write("b", 12);
	const back = { ...start, iteration: 4 };
	expect(() => requireOwnSteps(save, back)).toThrow(
		"holds iter_0000012, which this run neither loads nor has written: --save-over",
	);
	rmSync(join(save, "iter_0000012"), { recursive: true });
	expect(requireOwnSteps(save, back)).toEqual(["iter_0000004", "iter_0000008"]);
	// Killed between the newest checkpoint and its name in latest.json.
	writeFileSync(
		join(save, latestName),
		JSON.stringify({ format: formatName, iteration: 4, dir: "iter_0000004", indexSha256: "" }),
	);
	expect(requireOwnSteps(save, start)).toEqual(["iter_0000004", "iter_0000008"]);
	writeFileSync(join(save, latestName), "damaged");
	expect(requireOwnSteps(save, start)).toEqual(["iter_0000004", "iter_0000008"]);
});
