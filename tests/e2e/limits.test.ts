/** A refusal of the system is one sentence that names the limit, and exit code 1. */
import { afterAll, expect, test } from "bun:test";
import { openSync } from "node:fs";
import { executable } from "../commands/mimo.ts";
import { SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());

const flags =
	"--preset nemotron-tiny --hidden-size 64 --seq-length 32 --lr-warmup-iters 1 --train-iters 2 --device cpu --threads 1 --data-path text.txt";

/** Trains on two ranks under a limit of the shell. */
function under(limit: string) {
	const command = [
		"sh",
		"-c",
		`${limit} && exec "$@"`,
		"sh",
		executable,
		"train",
		...flags.split(" "),
		"--llm-dp",
		"2",
	];
	const { exitCode, stderr } = Bun.spawnSync(command, { cwd: run.folder, stdout: "pipe", stderr: "pipe" });
	return { exitCode, stderr: stderr.toString() };
}

const limits: readonly [limit: string, message: RegExp][] = [
	["ulimit -f 5000", /^mimo: The embedded library of \d+ bytes cannot be unpacked: files .* \(ulimit -f\)\.\n$/],
	["ulimit -v 2000000", /^mimo: Native libraries cannot be called: the system gave no room .* ulimit -v\)\.\n$/],
	["ulimit -n 12", /^mimo: The system refused \w+( of \S+)?: too many open files \(ulimit -n\)\.\n$/],
];
for (const [limit, message] of limits) {
	test(limit, () => {
		expect(under(limit)).toEqual({ exitCode: 1, stderr: expect.stringMatching(message) });
	});
}

for (const ranks of ["1", "2"]) {
	test(`an output without room, ${ranks} ranks`, () => {
		const full = openSync("/dev/full", "w");
		const ended = Bun.spawnSync([executable, "train", ...flags.split(" "), "--llm-dp", ranks], {
			cwd: run.folder,
			stdout: full,
			stderr: "pipe",
		});
		expect([ended.exitCode, ended.stderr.toString()]).toEqual([
			1,
			"mimo: Cannot write standard output: no space left on the device.\n",
		]);
	});
}

for (const command of [
	"--help",
	"--version",
	"doctor",
	"train --help",
	"train --preset nemotron-tiny --print-config",
	"completion bash",
]) {
	test(`what ${command} prints does not fit`, () => {
		const full = openSync("/dev/full", "w");
		const ended = Bun.spawnSync([executable, ...command.split(" ")], { cwd: run.folder, stdout: full, stderr: "pipe" });
		expect([ended.exitCode, ended.stderr.toString()]).toEqual([
			1,
			"mimo: Cannot write standard output: no space left on the device.\n",
		]);
	});
}

test("a long text reaches a slow reader whole, and none that has left", () => {
	const through = (reader: string) => {
		const shell = `"$0" train --help all | (${reader}); echo "\${PIPESTATUS[0]}" >&2`;
		const { stdout, stderr } = Bun.spawnSync(["bash", "-c", shell, executable], { stdout: "pipe", stderr: "pipe" });
		return [stdout.toString().length, stderr.toString()] as const;
	};
	const [length, code] = through("sleep 0.3; cat");
	expect([length > 35_000, code]).toEqual([true, "0\n"]);
	expect(through("exec 0<&-; sleep 0.1")).toEqual([0, "141\n"]);
});
