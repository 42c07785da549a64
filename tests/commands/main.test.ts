import { expect, test } from "bun:test";
import { describeError } from "../../src/commands/command.ts";
import { Status } from "../../src/native/abi.ts";
import { NativeError, UserError } from "../../src/system/errors.ts";
import { executable, mimo } from "./mimo.ts";

test("help lists the commands, with and without a flag", () => {
	for (const args of [[], ["--help"], ["-h"]]) {
		const { exitCode, stdout, stderr } = mimo(args);
		expect([exitCode, stderr]).toEqual([0, ""]);
		for (const command of ["train", "doctor"]) expect(stdout).toMatch(new RegExp(`^  ${command} `, "m"));
	}
});

test("help and version are words too", () => {
	expect(mimo(["help"])).toEqual(mimo(["--help"]));
	expect(mimo(["help", "train"])).toEqual(mimo(["train", "--help"]));
	expect(mimo(["version"])).toEqual(mimo(["--version"]));
});

test("help takes less than 80 ms of processor time", () => {
	const microseconds = Array.from({ length: 10 }, () =>
		Number(Bun.spawnSync([executable, "--help"]).resourceUsage.cpuTime.total),
	);
	expect(Math.min(...microseconds)).toBeWithin(1, 80_000);
});

test("the version line has version, commit, ABI and libraries", () => {
	const { exitCode, stdout } = mimo(["--version"]);
	expect(exitCode).toBe(0);
	expect(stdout).toMatch(/^mimo \d+\.\d+\.\d+ \(commit \S+\), ABI \d+, libraries: .*cpu \(OpenBLAS [^)]*\).*\n$/);
});

test("MIMO_DEBUG is a level from 0 to 4", () => {
	for (const level of ["", "0", "4"]) {
		expect(mimo(["--help"], undefined, { MIMO_DEBUG: level }).exitCode).toBe(0);
	}
	for (const level of ["5", "-1", "1.5", "yes", "true", "info", " 1"]) {
		expect(mimo(["--help"], undefined, { MIMO_DEBUG: level })).toEqual({
			exitCode: 2,
			stdout: "",
			stderr: `mimo: MIMO_DEBUG is ${JSON.stringify(level)}; allowed is a level from 0 to 4.\n`,
		});
	}
});

test("an unknown command or flag is refused with the nearest", () => {
	for (const [argument, nearest] of [
		["trian", "command trian; the nearest is train"],
		["dokter", "command dokter; the nearest is doctor"],
		["constructor", "command constructor"],
		["--halp", "flag --halp; the nearest is --help"],
	] as const) {
		const { exitCode, stdout, stderr } = mimo([argument]);
		expect([exitCode, stdout]).toEqual([2, ""]);
		expect(stderr).toBe(`mimo: There is no ${nearest}. \`mimo --help\` lists all.\n`);
	}
});

test("arguments that a command does not take are refused", () => {
	for (const [args, sentence] of [
		[["doctor", "extra"], "extra: `mimo doctor` takes flags alone; `mimo doctor --help` lists its flags."],
		[["data", "info", "a", "b"], "b: `mimo data info` takes PATH; `mimo data info --help` lists its flags."],
		[["diagnose", "a", "b"], "b: `mimo diagnose` takes FOLDER; `mimo diagnose --help` lists its flags."],
	] as const) {
		const { exitCode, stdout, stderr } = mimo([...args]);
		expect([exitCode, stdout, stderr]).toEqual([2, "", `mimo: ${sentence}\n`]);
	}
});

test("a negative number is the value of its flag, which refuses it", () => {
	const { exitCode, stderr } = mimo(["data", "import", "absent", "--output", "set", "--shard-samples", "-1"]);
	expect([exitCode, stderr]).toEqual([2, 'mimo: --shard-samples is "-1"; allowed is an integer from 1 to 10000000.\n']);
});

test("MIMO_DEBUG=1 shows where an error came from", () => {
	expect(mimo(["trian"]).stderr).not.toMatch(/^\s+at /m);
	expect(mimo(["trian"], ".", { MIMO_DEBUG: "1" }).stderr).toMatch(/^\s+at /m);
});

test("a closed pipe is not an error", () => {
	const { exitCode, stderr } = Bun.spawnSync(["sh", "-c", `${executable} train --help | head -n 1`], {
		stdout: "pipe",
		stderr: "pipe",
	});
	expect([exitCode, stderr.toString()]).toEqual([0, ""]);
});

test("an error is one sentence; a program error says how to print the stack", () => {
	expect(describeError(new UserError("The file a.txt is empty.", 3))).toEqual({
		sentence: "The file a.txt is empty.",
		exitCode: 3,
	});
	expect(describeError(new RangeError("Out of memory")).sentence).toBe("Out of memory.");
	expect(describeError(new NativeError("mimo_memory_allocate", Status.outOfMemory, "8 GiB were refused."))).toEqual({
		sentence: "Out of memory: 8 GiB were refused.",
		exitCode: 1,
	});
	const room = new NativeError(
		"mimo_memory_allocate",
		Status.outOfMemory,
		"Out of device memory: no room for 8 bytes.",
	);
	expect(describeError(room)).toEqual({ sentence: "Out of device memory: no room for 8 bytes.", exitCode: 1 });
	expect(describeError(new NativeError("mimo_device_open", Status.unsupported, "This processor has no AVX2."))).toEqual(
		{
			sentence: "This processor has no AVX2.",
			exitCode: 1,
		},
	);
	expect(describeError(new NativeError("gemm", Status.argument, "k is negative."))).toEqual({
		sentence: "Unexpected error: k is negative. MIMO_DEBUG=1 shows where.",
		exitCode: 70,
	});
	expect(describeError(new TypeError("x is not a function")).exitCode).toBe(70);
	expect(describeError("thrown text").sentence).toContain("thrown text");
});

test("an error whose resources cannot be released either has both sentences and its own exit code", () => {
	const failing = (message: string) => ({
		[Symbol.dispose](): void {
			throw new NativeError("memory_free", Status.device, message);
		},
	});
	const thrown = (() => {
		try {
			using _outer = failing("CUDA failed at a free.");
			using _inner = failing("CUDA failed at a free.");
			throw new UserError("The file a.txt is empty.", 3);
		} catch (error) {
			return error;
		}
	})();
	expect(thrown).toBeInstanceOf(SuppressedError);
	expect(describeError(thrown)).toEqual({
		sentence: "The file a.txt is empty. Then: CUDA failed at a free.",
		exitCode: 3,
	});
});
