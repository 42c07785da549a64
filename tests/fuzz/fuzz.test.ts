/** Hundreds of mutated inputs of every parser; fifty thousand under MIMO_TEST_FULL. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fuzz, parsersIn, resultTable } from "./driver.ts";
import { jsonSpans } from "./json-spans.ts";
import { Mutator } from "./mutate.ts";

const cases = process.env.MIMO_TEST_FULL ? 50_000 : 350;

let folder: string;
beforeAll(() => {
	folder = mkdtempSync(join(tmpdir(), "mimo-fuzz-test-"));
});
afterAll(() => rmSync(folder, { recursive: true }));

for (const [name, path] of parsersIn(join(import.meta.dir, "parsers"))) {
	test(name, async () => {
		const result = await fuzz(name, path, { cases, seed: 20, seconds: 60, output: folder });
		expect(result.failures).toEqual([]);
		expect(result.failed).toBe(0);
		expect(result.refused).toBeGreaterThan(0);
		expect(result.cases).toBeGreaterThan(100);
	}, 90_000);
}

test("a fault of a parser is seen, whatever its kind, and its input is saved", async () => {
	const result = await fuzz("faults", join(import.meta.dir, "broken/faults.ts"), {
		cases: 420,
		seed: 1,
		output: folder,
		patience: 3,
	});
	const reasons = result.failures.map(({ reason }) => reason).join("\n");
	expect(reasons).toMatch(/^UserError: It is bad/m);
	expect(reasons).toMatch(/^TypeError/m);
	expect(reasons).toMatch(/^it took \d+ ms, 60 ms are allowed/m);
	expect(reasons).toMatch(/^the process grew by \d+ bytes/m);
	expect(reasons).toMatch(/^it hangs/m);
	expect(reasons).toMatch(/^the process ended with 3/m);
	expect(reasons).not.toContain("is bad.\nfuzzed-input");
	expect(result.refused).toBeGreaterThan(0);
	for (const { file } of result.failures) if (file !== null) expect(existsSync(file)).toBeTrue();
	const saved = result.failures.find(({ reason }) => reason.startsWith("TypeError"))!;
	expect(readFileSync(saved.file!)[0]).toBe(0x34);
	expect(resultTable([result])[1]).toStartWith("faults");
}, 60_000);

test("a case is a function of seed and number", () => {
	const target = { seeds: [Buffer.from('{"a": [1, {"b": "c"}], "d": null}')], json: true, dictionary: ["xyz"] };
	const [one, other] = [new Mutator(target), new Mutator(target)];
	for (let i = 99; i >= 0; i--) one.input(5, i);
	const made = Array.from({ length: 100 }, (_, i) => Buffer.from(other.input(5, i)).toString("hex"));
	expect(Array.from({ length: 100 }, (_, i) => Buffer.from(one.input(5, i)).toString("hex"))).toEqual(made);
	expect(new Set(made).size).toBeGreaterThan(90);
});

test("values, members and keys of JSON are found", () => {
	const text = Buffer.from(' {"a": [1, {"b": "}\\""}], "d": null} ');
	const of = (list: readonly { readonly begin: number; readonly end: number }[]) =>
		list.map(({ begin, end }) => text.toString("utf8", begin, end));
	const { values, elements, keys } = jsonSpans(text)!;
	expect(of(keys)).toEqual(['"a"', '"b"', '"d"']);
	expect(of(values)).toEqual(["1", '"}\\""', '{"b": "}\\""}', '[1, {"b": "}\\""}]', "null", text.toString().trim()]);
	expect(of(elements)).toEqual(["1", '"b": "}\\""', '{"b": "}\\""}', '"a": [1, {"b": "}\\""}]', '"d": null']);
	expect(jsonSpans(Buffer.from("{"))).toBeNull();
});
