/** `mimo train` whose data get stuck, on a server or on a local file system: every rank ends, and the file is named. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { captions, Scratch } from "../data/fixtures.ts";
import { startStuckServer } from "../data/storage/stuck-server.ts";
import { CallWatcher, type Stop } from "../watch-calls.ts";

const scratch = new Scratch();
let base: string;
let stop: () => void;
let watcher: CallWatcher;
beforeAll(async () => {
	captions(scratch, "set", [17, 9, 12]);
	scratch.file("texts/text.txt", "the quick brown fox jumps over the lazy dog. ".repeat(200));
	({ base, stop } = await startStuckServer(scratch.path));
	watcher = new CallWatcher(scratch.path);
}, 60_000);
afterAll(() => {
	stop();
	scratch[Symbol.dispose]();
});

const train = (path: string, more: string): string[] =>
	`train --preset nemotron-vlm-tiny --data-path ${path} --data-timeout 2 --data-cache-folder cache --seq-length 64 --train-iters 2 --micro-batch-size 2 --global-batch-size 4 --lr-warmup-iters 1 --data-end-id 10 --hidden-size 32 --mamba-num-heads 2 --vision-hidden-size 32 --threads 1 ${deviceFlags} ${more}`.split(
		" ",
	);
const text = train("texts/text.txt", "--llm-only");

test.each(["silent", "drip"])(
	"a %s server ends all ranks with a sentence that names the shard",
	(mode) => {
		const { exitCode, stderr } = mimo(train(`${base}/${mode}/set`, "--llm-dp 2"), scratch.path);
		const [first, ...others] = stderr.trim().split("\n");
		expect(first).toMatch(
			/^mimo: rank \d .* failed: data-timeout 2: http:\S+\/set-00\d\.tar: .* did not arrive within 2 s, in /,
		);
		expect([exitCode, others.length]).toEqual([1, 2]);
	},
	90_000,
);

test("a file system that hangs ends all ranks with a sentence that names the shard", () => {
	if (!watcher.works) return;
	const stop: Stop = { action: "hold", call: "open set-001.tar", nth: 1 };
	const { exitCode, stderr } = watcher.run(join(scratch.path, "set"), stop, [
		executable,
		...train("set", "--llm-dp 2"),
	]);
	expect([exitCode, stderr.split("\n")[0]]).toEqual([
		1,
		expect.stringMatching(
			/^mimo: rank \d .* failed: data-timeout 2: set\/set-001\.tar cannot be read, its file system gives no answer/,
		),
	]);
}, 90_000);

test.each([
	["set", ".nv-meta/.info.json", 1, train("set", "--llm-offset 0")],
	["texts", "text.txt", 1, text],
	["texts", "text.txt", 3, text],
] as const)(
	"a file system that hangs before the ranks read: %s/%s, read %i",
	(folder, file, nth, command) => {
		if (!watcher.works) return;
		const stop: Stop = { action: "hold", call: `open ${file}`, nth };
		const { exitCode, stderr } = watcher.run(join(scratch.path, folder), stop, [executable, ...command]);
		const sentence = `mimo: data-timeout 2: ${folder}/${file} cannot be read, its file system gives no answer.\n`;
		expect([exitCode, stderr]).toEqual([1, sentence]);
	},
	90_000,
);
