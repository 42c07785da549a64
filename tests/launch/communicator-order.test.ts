/**
 * All ranks create their communicators, at the first collectives of their groups, in orders without deadlock. Of three encoder
 * ranks here one has no image in its last microbatch, so that its backward starts no all-reduce. The other two wait for this
 * all-reduce before they create the communicator of the whole run, so the rank has to start it before it does.
 */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const root = join(import.meta.dir, "../..");
const folder = mkdtempSync(join(tmpdir(), "mimo-meeting-"));
afterAll(() => rmSync(folder, { recursive: true }));

/** Runs mimo with ranks that create communicators as NCCL's do; returns the groups and pairs that have created one. */
function runMimo(name: string, ...words: string[]): { output: string; met: string[] } {
	const file = join(folder, name);
	const run = Bun.spawnSync([process.execPath, "src/main.ts", ...words, "--device", "cpu", "--threads", "1"], {
		cwd: root,
		env: {
			...process.env,
			BUN_OPTIONS: `--preload ${join(import.meta.dir, "communicator-order-preload.ts")}`,
			MIMO_TEST_MET: file,
		},
		stdout: "pipe",
		stderr: "pipe",
		timeout: 50_000,
	});
	return { output: `${run.stdout}${run.stderr}`, met: readFileSync(file, "utf8").split("\n") };
}

test("no two ranks wait for each other in different groups", () => {
	const flags = ["--preset", "nemotron-vlm-tiny", "--global-batch-size", "12"];
	const { output, met } = runMimo("groups", "verify", ...flags, "--layouts", "3+1");
	expect(output).toContain("The layout gives what one process gives.");
	expect(met.filter((name) => name === "radio_encoder.dp")).toHaveLength(3);
	expect(met.filter((name) => name === "world")).toHaveLength(4);
}, 60_000);

test("ranks that send each other images and hidden states do not wait for each other", () => {
	const golden = "tests/golden/mimo-tp2-tp2ep2-dynamic-small";
	const { output, met } = runMimo("pairs", "parity", "--golden", golden, "--layout", "dp2|pp2");
	expect(output).toContain("all 350 values agree.");
	// Each way once, by both, and no direction that no row takes.
	const ways = [
		"radio_encoder.forward.1-0",
		"radio_encoder.backward.0-1",
		"language.forward.0-1",
		"language.backward.1-0",
	];
	const expected = ways.flatMap((way) => [`edge.${way}`, `edge.${way}`]);
	expect(met.filter((name) => name.startsWith("edge.")).toSorted()).toEqual(expected.toSorted());
}, 60_000);
