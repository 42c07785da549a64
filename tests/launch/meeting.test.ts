/**
 * Ranks come to the first collectives of their groups in orders that fit each other. Of three encoder ranks here one has no
 * image in its last microbatch, so that its backward starts no sum, which the others wait for before they can meet anybody
 * else: it has to start it before it comes to the whole run's group.
 */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const root = join(import.meta.dir, "../..");
const folder = mkdtempSync(join(tmpdir(), "mimo-meeting-"));
afterAll(() => rmSync(folder, { recursive: true }));

test("no rank waits to meet a group while another waits for it elsewhere", () => {
	const file = join(folder, "met");
	const flags = ["--device", "cpu", "--preset", "nemotron-vlm-tiny", "--global-batch-size", "12", "--threads", "1"];
	const run = Bun.spawnSync([process.execPath, "src/main.ts", "verify", ...flags, "--layouts", "3+1"], {
		cwd: root,
		env: {
			...process.env,
			BUN_OPTIONS: `--preload ${join(import.meta.dir, "meeting-preload.ts")}`,
			MIMO_TEST_MET: file,
		},
		stdout: "pipe",
		stderr: "pipe",
		timeout: 50_000,
	});
	expect(`${run.stdout}${run.stderr}`).toContain("All 1 layouts give what one process gives.");
	const met = readFileSync(file, "utf8").split("\n");
	expect(met.filter((name) => name === "radio_encoder.dp")).toHaveLength(3);
	expect(met.filter((name) => name === "world")).toHaveLength(4);
}, 60_000);
