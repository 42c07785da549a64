/** Exit codes stand in one table: the documentation says the same, and no other file spells one. */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { exitCodes, signalExit } from "../../src/system/exit-codes.ts";

const root = join(import.meta.dir, "../..");
const text = (file: string) => readFileSync(join(root, file), "utf8");

test("codes differ, and those that job managers act on are the system's", () => {
	const codes = Object.values(exitCodes);
	expect(new Set(codes).size).toBe(codes.length);
	// sysexits.h: EX_UNAVAILABLE, EX_SOFTWARE, EX_TEMPFAIL.
	expect([exitCodes.endedByAnother, exitCodes.unexpected, exitCodes.runAgain]).toEqual([69, 70, 75]);
	expect([exitCodes.interrupted, exitCodes.unread, signalExit("SIGTERM")]).toEqual([130, 141, 143]);
});

test("docs/launching.md names every one", () => {
	const table = [...text("docs/launching.md").matchAll(/^\| ([\d, ]+?) *\| /gm)].flatMap(([, codes]) =>
		codes!.split(", ").map(Number),
	);
	expect(table.sort((a, b) => a - b)).toEqual(
		[0, signalExit("SIGTERM"), ...Object.values(exitCodes)].sort((a, b) => a - b),
	);
});

test("no other source file spells an exit code", () => {
	const spelled = /\b_?exit\([1-9]|[eE]xit(Code)? = [1-9]|UserError\([^;]*[`"], \d+\)/g;
	const files = ["src/**/*.ts", "cuda/common/**/*.{h,cpp}", "cuda/{cpu,gpu}/**/*.{h,cpp,cu}"].flatMap((pattern) => [
		...new Bun.Glob(pattern).scanSync(root),
	]);
	expect(files.length).toBeGreaterThan(400);
	expect(files.flatMap((file) => (text(file).match(spelled) ?? []).map((found) => `${file}: ${found}`))).toEqual([]);
});
