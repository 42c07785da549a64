/**
 * dist/mimo parity: every mimo-* reference folder on every layout that the references' README asks for, as processes
 * (MIMO_TEST_FULL=1; `npm run test:layouts`), and what a folder that does not agree looks like.
 */
import { describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { mimo } from "../commands/mimo.ts";
import { golden } from "../golden.ts";

const full = process.env.MIMO_TEST_FULL === "1";

/** null: the folder's own, which no flag names. */
const layouts: Readonly<Record<string, readonly (string | null)[]>> = {
	"mimo-1x1-dynamic": [null, "1", "1+1", "tp2+tp2ep2", "tp2+1"],
	"mimo-1x1-fixed": [null, "1", "1+1", "tp2+tp2ep2", "tp2+1"],
	"mimo-tp2-tp2ep2-dynamic": [null, "1", "1+1", "tp2+tp2ep2", "tp4+tp2ep2etp1", "1+tp2ep2etp2"],
	"mimo-dp2-dp2ep2-fixed": [null, "1", "1+1", "dp2+dp2ep2", "tp2dp2+tp2dp2ep2", "1+dp2ep2", "4+4", "tp2+tp4"],
	"mimo-participation-exact": [null, "1", "1+1", "dp2+dp2ep2", "1+dp2ep2", "4+dp2ep2", "tp2dp2+tp4ep4"],
	"mimo-participation-corrected": [null, "dp2+dp2ep2", "tp2dp2+dp2ep2", "dp2+tp2dp2ep2"],
};

describe.skipIf(!full)("agrees on processes", () => {
	for (const [name, wanted] of Object.entries(layouts)) {
		for (const layout of wanted) {
			test(`${name} on ${layout ?? "its own layout"}`, () => {
				const folder = golden(name);
				if (folder === null) return;
				const { exitCode, stdout, stderr } = mimo([
					"parity",
					"--golden",
					folder,
					...(layout === null ? [] : ["--layout", layout]),
				]);
				expect([exitCode, stderr]).toEqual([0, ""]);
				expect(stdout).toMatch(/: all \d{3} values agree\.\n$/);
			}, 300_000);
		}
	}
});

test("a folder that does not agree ends with 1, its first difference, and not a word of failed ranks", () => {
	const folder = golden("mimo-1x1-fixed");
	if (folder === null) return;
	const scratch = mkdtempSync(join(tmpdir(), "mimo-wrong-"));
	try {
		const wrong = join(scratch, "wrong");
		cpSync(folder, wrong, { recursive: true });
		const config = JSON.parse(readFileSync(join(folder, "config.json"), "utf8"));
		config.optimizer.weight_decay *= 1.5;
		const changed = join(wrong, "config.json");
		rmSync(changed, { force: true });
		writeFileSync(changed, JSON.stringify(config));
		const { exitCode, stdout, stderr } = mimo(["parity", "--golden", wrong, "--device", "cpu"]);
		expect(stdout).toMatch(/\/wrong: FAILED, first at step [2-9] .*, off by \S+ \(limit \S+\)\.\n$/);
		expect([exitCode, stderr]).toEqual([1, ""]);
	} finally {
		rmSync(scratch, { recursive: true });
	}
}, 120_000);
