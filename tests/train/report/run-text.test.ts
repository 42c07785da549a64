import { expect, test } from "bun:test";
import { join } from "node:path";
import { shownPath } from "../../../src/train/report/run-text.ts";

test("files below the working folder are shown from there, others as they were given", () => {
	const here = process.cwd();
	expect(shownPath(join(here, "runs/a/log.jsonl"))).toBe("runs/a/log.jsonl");
	for (const path of ["log.jsonl", "../log.jsonl", here, join(here, "../log.jsonl"), "/log.jsonl"]) {
		expect(shownPath(path)).toBe(path);
	}
});
