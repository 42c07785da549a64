/** `mimo train` of the tiny preset on the library built with ASan and UBSan: no report, and losses as always. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { absent } from "../absent.ts";
import { sanitizerEnvironment } from "../sanitizer.ts";
import { loggedSteps } from "./small-run.ts";

const root = join(import.meta.dir, "../..");
const full = process.env.MIMO_TEST_FULL === "1";
const steps = full ? 100 : 3;
/** Without --full a step has a few short sequences: all the same operations. */
const small = full ? [] : ["--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "4"];
const library =
	existsSync(join(root, "build/lib-sanitize/libmimo_cpu.so")) ||
	absent("the sanitized library", "npm run build:sanitize");

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-sanitizer-"));
	writeFileSync(join(folder, "text.txt"), readFileSync(join(root, "LICENSE"), "utf8").repeat(4));
});
afterAll(() => rmSync(folder, { recursive: true }));

/** Trains and returns the losses. */
function train(name: string, env: Record<string, string>): number[] {
	const log = join(folder, `${name}.jsonl`);
	const flags = ["--preset", "nemotron-tiny", "--data-path", join(folder, "text.txt"), "--log-json", log, ...small];
	const child = Bun.spawnSync(
		[join(root, "dist/mimo"), "train", ...flags, "--train-iters", String(steps), "--lr-warmup-iters", "1"],
		{ cwd: folder, env: { ...process.env, ...env } },
	);
	const output = `${child.stdout}${child.stderr}`;
	expect(output).not.toMatch(/Sanitizer|runtime error/);
	expect(child.exitCode).toBe(0);
	return loggedSteps(log).map((step) => step["lm loss"] as number);
}

test.skipIf(!library)(`${steps} steps without a report`, () => {
	const sanitized = train("sanitized", sanitizerEnvironment(root));
	// The same kernels, differently optimised.
	const plain = train("plain", { MIMO_CPU_INSTRUCTIONS: "avx2" });
	expect(sanitized.length).toBe(steps);
	for (const [index, loss] of sanitized.slice(0, 3).entries()) {
		expect(Math.abs(loss / plain[index]! - 1)).toBeLessThan(1e-4);
	}
});
