/**
 * A run under attack for a few seconds gives the results of an undisturbed one; the lateness of steps is measured by
 * hand.
 */
import { expect, test } from "bun:test";
import { join } from "node:path";

test("attackers change neither the result of a run nor its memory", () => {
	const command = [process.execPath, join(import.meta.dir, "attackers.ts"), "--seconds", "5", "--no-timing"];
	const { exitCode, stdout, stderr } = Bun.spawnSync(command, { stdout: "pipe", stderr: "pipe", timeout: 110_000 });
	expect(`${stdout}${stderr}`).toMatch(/^lying .* equal /m);
	expect([exitCode, `${stdout}${stderr}`.match(/FAILED.*/)]).toEqual([0, null]);
}, 120_000);
