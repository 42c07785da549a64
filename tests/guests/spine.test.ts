/** The spine of a training names no guest: neither its code nor its comments have their words. */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const source = join(import.meta.dir, "../../src");

/** Of the spine: steps and schedules, but not what feeds, restarts and reports a run. */
function ofSpine(file: string): boolean {
	return /^(train|schedule|parallel)\//.test(file) && !/^train\/(feed|restart|report)\//.test(file);
}

const words =
	/elastic|submodel|flextron|teacher|distil|budget|\bmtp|(?<!exp)lora|prefetch|encoder-?balance|balance-?by-?cost/i;

test("the spine names no guest", () => {
	const files = [...new Bun.Glob("**/*.ts").scanSync(source)].filter(ofSpine);
	const named = files.flatMap((file) =>
		readFileSync(join(source, file), "utf8")
			.split("\n")
			.flatMap((line, at) => {
				const found = words.exec(line.replaceAll("../guests/index.ts", ""));
				return found ? [`${file}:${at + 1}: ${found[0]}`] : [];
			}),
	);
	expect(named).toEqual([]);
	expect(files.length).toBeGreaterThan(40);
});

test("the spine imports guests by their interface and their list", () => {
	const files = [...new Bun.Glob("**/*.ts").scanSync(source)].filter(ofSpine);
	const imported = files.flatMap((file) => {
		const text = readFileSync(join(source, file), "utf8");
		return Array.from(text.matchAll(/"(?:\.\.\/)+guests\/([^"]+)"/g), ([, path]) => `${file}: ${path}`);
	});
	expect(imported.filter((line) => !/: (guest|index)\.ts$/.test(line))).toEqual([]);
	expect(imported).not.toEqual([]);
});
