/** Every operation of the ABI has each place that docs/add-an-operation.md names, and the page names the same places. */
import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { wholeAbi } from "../cuda/include/header.ts";

const root = join(import.meta.dir, "..");
const operations = Object.keys(wholeAbi().operations);

/** Files of a pattern, as one list of path and text. */
function filesOf(pattern: string): (readonly [path: string, text: string])[] {
	return [...new Bun.Glob(pattern).scanSync(root)].map((path) => [path, readFileSync(join(root, path), "utf8")]);
}

/** A call of an operation from TypeScript. */
const call = (name: string) => new RegExp(`\\brun\\(\\s*"${name}"`);

/** Places of each operation: files, and the text that one of them holds for it. */
const places: Readonly<Record<string, (name: string) => RegExp>> = {
	"cuda/include/mimo/ops/*.h": (name) => new RegExp(`const mimo_${name}_args\\* args\\);`),
	"src/native/abi.ts": (name) => new RegExp(`^\\t${name}: \\{`, "m"),
	"cuda/common/operations.def": (name) => new RegExp(`^MIMO_OPERATION\\(${name}\\)$`, "m"),
	"cuda/cpu/ops/*.cpp": (name) => new RegExp(`^void ${name}\\(mimo_stream&(?: \\w+)?, const mimo_${name}_args& `, "m"),
	"cuda/gpu/ops/*.cu": (name) => new RegExp(`^void ${name}\\(mimo_stream&(?: \\w+)?, const mimo_${name}_args& `, "m"),
	"src/**/*.ts": call,
	"tests/cuda/cases_*.cpp": (name) => new RegExp(`run\\.call\\("mimo_${name}"`),
	"src/plan/operation-work.ts": (name) => new RegExp(`(^\\t${name}: \\d|case "${name}")`, "m"),
};

for (const [pattern, holds] of Object.entries(places)) {
	test(`${pattern} has every operation`, () => {
		const texts = filesOf(pattern).map(([, text]) => text);
		expect(texts.length).toBeGreaterThan(0);
		expect(operations.filter((name) => !texts.some((text) => holds(name).test(text)))).toEqual([]);
	});
}

describe("tests/tensor/*.test.ts:", () => {
	test("every file of src/tensor/ops that records on a tape has its gradients checked", () => {
		const tests = new Map(filesOf("tests/tensor/*.test.ts").map(([path, text]) => [basename(path, ".test.ts"), text]));
		const recording = filesOf("src/tensor/ops/*.ts").filter(([, text]) => text.includes("tape.record("));
		const ops = recording.map(([path]) => basename(path, ".ts"));
		expect(ops.length).toBeGreaterThan(10);
		expect(ops.filter((name) => !tests.get(name)?.includes("checkGradients("))).toEqual([]);
	});

	test("every operation named after a direction is run there", () => {
		const texts = filesOf("src/tensor/ops/*.ts").map(([, text]) => text);
		const differentiable = operations.filter((name) => /_(forward|backward|weight_gradient)$/.test(name));
		expect(differentiable.length).toBeGreaterThan(15);
		expect(differentiable.filter((name) => !texts.some((text) => call(name).test(text)))).toEqual([]);
	});
});

test("docs/add-an-operation.md names the same places", () => {
	const page = readFileSync(join(root, "docs/add-an-operation.md"), "utf8");
	const named = [...page.matchAll(/^\| `([^`]+)` /gm)].map(([, place]) => place!);
	expect(named.toSorted()).toEqual([...Object.keys(places), "tests/tensor/*.test.ts"].toSorted());
});
