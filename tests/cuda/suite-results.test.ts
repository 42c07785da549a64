/** Which files run on a device, and reading what `bun test` prints about several files. */
import { expect, test } from "bun:test";
import { suiteJobs } from "./suite-files.ts";
import { failureText, fileResults } from "./suite-results.ts";

const files = ["tests/a.test.ts", "tests/b.test.ts", "tests/c.test.ts"];
const first = [
	"bun test v1.4.5",
	"",
	"tests/a.test.ts:",
	"(pass) adds [250.00ms]",
	"(skip) needs a file",
	"(pass) takes away [1.50s]",
].join("\n");
const second = ["tests/b.test.ts:", "error: expect(received).toBe(expected)", "(fail) is equal [0.10ms]"].join("\n");

const briefly = (output: string, ended: string | number) => {
	const { results, left } = fileResults(output, files, ended);
	return [results.map(({ file, passed, failed, problem }) => [file.slice(6, 7), passed, failed, problem]), left];
};

test("every file has its own counts, seconds and output", () => {
	const output = `${first}\n\n${second}\n\ntests/c.test.ts:\n(pass) is [1ms]\n\n1 tests failed:\n(fail) is equal [0.10ms]\n\nRan 5 tests across 3 files. [3.00s]\n`;
	expect(briefly(output, 1)).toEqual([
		[
			["a", 2, 0, null],
			["b", 0, 1, "1 failed"],
			["c", 1, 0, null],
		],
		[],
	]);
	const [a, b] = fileResults(output, files, 1).results;
	expect([a!.seconds, a!.skipped]).toEqual([1.75, 1]);
	expect(b!.output).toContain("error: expect(received)");
});

test("a crash fails the file that ran and leaves those behind it for another process", () => {
	expect(briefly(`${first}\n\n${second}\n`, "SIGSEGV")).toEqual([
		[
			["a", 2, 0, null],
			["b", 0, 2, "ended early (SIGSEGV)"],
		],
		["tests/c.test.ts"],
	]);
});

test("a process that names no file fails all, and so does a file that a whole run does not name", () => {
	expect(briefly("error: no such library\n", 1)).toEqual([
		files.map((file) => [file.slice(6, 7), 0, 1, "printed nothing (1)"]),
		[],
	]);
	const [results] = briefly(`${first}\n\nRan 3 tests across 1 file. [2.00s]\n`, 0);
	expect(results!.slice(1)).toEqual([
		["b", 0, 1, "printed nothing (0)"],
		["c", 0, 1, "printed nothing (0)"],
	]);
});

test("what is shown of a failure are the lines before it, and the last ones of a crash", () => {
	const body =
		"(pass) is\nerror: one\nsecond\n(fail) first [1ms]\n(pass) is\nlost\n(fail) other [1ms]\nSegmentation fault";
	const { results } = fileResults(`tests/a.test.ts:\n${body}\n`, files, "SIGSEGV");
	expect(failureText(results[0]!, 2)).toBe("second\n(fail) first [1ms]\nlost\n(fail) other [1ms]\nSegmentation fault");
});

test("every pattern of the files that run on a device has its files", () => {
	const files = suiteJobs([]).flatMap((job) => job.files);
	expect(new Set(files).size).toBe(files.length);
});
