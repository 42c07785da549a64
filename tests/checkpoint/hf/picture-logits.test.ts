/** Folders of vision-language models as transformers reads them: ids of its processors, and logits, of pictures of several sizes. */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { openSafetensors } from "../../../src/checkpoint/safetensors.ts";
import { encodePng } from "../../../src/data/vision-language/pixels.ts";
import { golden } from "../../golden.ts";
import { logitsOf } from "../../reference/own-logits.ts";
import { referencePython, runPython } from "../../reference/python.ts";
import { largestDifference } from "../../train/restart/forward.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-picture-logits-"));
afterAll(() => rmSync(folder, { recursive: true }));

/** A PNG file of waves. */
function picture(width: number, height: number): string {
	const pixels = Uint8Array.from({ length: 3 * width * height }, (_, at) => {
		const [x, y] = [Math.floor(at / 3) % width, Math.floor(at / 3 / width)];
		return 128 + 120 * Math.sin((x * (1 + (at % 3)) + 2 * y) / 5);
	});
	const path = join(folder, `${width}x${height}.png`);
	writeFileSync(path, encodePng({ width, height, channels: 3, pixels }));
	return path;
}

type Size = readonly [width: number, height: number];
/** Pictures of each question: a wide one, one whose rows are resized, two. */
const questions: readonly (readonly Size[])[] = [
	[[90, 20]],
	[[50, 61]],
	[
		[40, 20],
		[13, 30],
	],
];

const python = referencePython("torch", "torchvision", "transformers", "peft");
describe.skipIf(python === null)("transformers has the same ids, and logits to 2e-5, of pictures with", () => {
	test.each(process.env.MIMO_TEST_FULL === "1" ? ["llava-onevision", "glm4v-moe"] : ["llava-onevision"])(
		"%s",
		async (name) => {
			const files = questions.map((sizes) => sizes.map(([width, height]) => picture(width, height)));
			const out = join(folder, "logits.safetensors");
			const script = join(import.meta.dir, "../../reference/picture_logits.py");
			await runPython(python!, [script, golden(name), "-", "What is it?", out, ...files.map((paths) => paths.join())]);
			using reference = openSafetensors(out);
			for (const [k, paths] of files.entries()) {
				const { ids, logits } = await logitsOf(["--load-hf", golden(name), "--no-bf16"], paths, "What is it?");
				expect(ids).toEqual([...(reference.read(`ids.${k}`) as Int32Array)]);
				expect(largestDifference(logits, reference.read(`logits.${k}`) as Float32Array)).toBeLessThan(2e-5);
			}
		},
		120_000,
	);
});
