/** `mimo data prepare` waits for another command that writes into the same folder. */
import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import { newRunName, ownHolder, WriterClaim } from "../../src/checkpoint/native/writer-lock.ts";
import { executable } from "../commands/mimo.ts";
import { captions, Scratch } from "./fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

test("a folder that another command writes into is prepared after it", async () => {
	captions(scratch, "set", [3]);
	const { lock } = new WriterClaim(join(scratch.path, "set"), ownHolder(newRunName())).attempt();
	const child = Bun.spawn([executable, "data", "prepare", "set", "--force-overwrite", "--split-ratio", "1,0,0"], {
		cwd: scratch.path,
		stdout: "pipe",
		stderr: "pipe",
	});
	const reader = child.stderr.getReader();
	const first = new TextDecoder().decode((await reader.read()).value);
	expect(first).toContain(`process ${process.pid} on `);
	expect(first).toContain("writes to set (PATH): waiting up to 10 s for its end.");
	expect(child.exitCode).toBeNull();
	lock![Symbol.dispose]();
	reader.releaseLock();
	expect([await child.exited, await new Response(child.stdout).text()]).toEqual([
		0,
		expect.stringMatching(/^3 samples in 1 shard\b/),
	]);
}, 30_000);
