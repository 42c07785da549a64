/** The size of the source tree: lines and files of every room, which may only fall, and exports that nothing uses. */
import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const root = join(import.meta.dir, "..");

/**
 * Most lines and files of each folder of src. A number rises only in the commit that says why; lower it with what you delete.
 */
const budget: Readonly<Record<string, readonly [lines: number, files: number]>> = {
	checkpoint: [19157, 97],
	commands: [5335, 40],
	config: [7704, 53],
	data: [20890, 109],
	decode: [728, 3],
	guests: [4801, 32],
	inference: [1763, 10],
	launch: [4330, 25],
	models: [6556, 59],
	native: [3830, 17],
	observe: [5387, 33],
	optim: [990, 8],
	parallel: [3111, 21],
	parity: [6667, 35],
	plan: [2661, 14],
	schedule: [1030, 8],
	system: [697, 12],
	tensor: [5137, 41],
	train: [7272, 46],
};

const sources = [...new Bun.Glob("src/**/*.ts").scanSync(root)].filter((file) => !file.endsWith(".d.ts")).sort();
/** Generated: all that the headers declare. */
const generated = "src/native/abi.ts";
const users = [...new Bun.Glob("{src,tests,packaging,cuda}/**/*.ts").scanSync(root), "build.ts"];
const texts = new Map(users.map((file) => [file, readFileSync(join(root, file), "utf8")]));

test("no folder of src is larger than its budget", () => {
	const sizes = new Map<string, [lines: number, files: number]>();
	for (const file of sources) {
		const room = file.split("/")[1]!;
		if (room === "main.ts") continue;
		const [lines, files] = sizes.get(room) ?? [0, 0];
		sizes.set(room, [lines + texts.get(file)!.split("\n").length - 1, files + 1]);
	}
	const over = [...sizes].filter(([room, [lines, files]]) => {
		const [mostLines, mostFiles] = budget[room] ?? [0, 0];
		return lines > mostLines || files > mostFiles;
	});
	expect(over).toEqual([]);
	expect(sizes.size).toBe(Object.keys(budget).length);
});

/** Names that a text exports as functions, classes and constants. */
export function exportsOf(text: string): string[] {
	const declared = /^export (?:async )?(?:abstract )?(?:function\*?|class|const|let) ([\w$]+)/gm;
	return [...text.matchAll(declared)].map(([, name]) => name!);
}

test("every exported function, class and constant is used by another file", () => {
	const written = sources.filter((file) => file !== generated);
	const exported = written.flatMap((file) => exportsOf(texts.get(file)!).map((name) => [file, name] as const));
	const wanted = new Set(exported.map(([, name]) => name));
	const uses = new Map<string, number>();
	for (const text of texts.values()) {
		const words = new Set<string>();
		for (const [word] of text.matchAll(/[A-Za-z_$][\w$]*/g)) if (wanted.has(word)) words.add(word);
		for (const word of words) uses.set(word, (uses.get(word) ?? 0) + 1);
	}
	const unused = exported.filter(([, name]) => uses.get(name) === 1).map(([file, name]) => `${file}: ${name}`);
	expect(unused).toEqual([]);
	expect(exportsOf("export const a = 1;\nexport async function b() {}\nconst c = 2;")).toEqual(["a", "b"]);
}, 30_000);
