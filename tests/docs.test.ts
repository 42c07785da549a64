/** Links between pages of the documentation lead to files of this repository. */
import { expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";

const root = join(import.meta.dir, "..");
const pages = [
	"README.md",
	"CONTRIBUTING.md",
	"SECURITY.md",
	...new Bun.Glob("{docs,examples}/**/*.md").scanSync(root),
];

/** Targets of a page's links inside the repository. */
export function linksIn(text: string): string[] {
	const prose = text.replace(/```[\s\S]*?```|`[^`\n]*`/g, "");
	return [...prose.matchAll(/\]\(([^)\s]+)\)/g)]
		.map(([, target]) => target!)
		.filter((target) => !/^[a-z]+:/.test(target) && !target.startsWith("#"))
		.map((target) => target.replace(/#.*$/, ""));
}

test("links are read", () => {
	expect(linksIn("[a](b.md) [c](https://x.org) [d](../e.md#part) [f](#g) `[h](i)`")).toEqual(["b.md", "../e.md"]);
});

test("every link leads to a file", () => {
	const broken = pages.flatMap((page) =>
		linksIn(readFileSync(join(root, page), "utf8"))
			.filter((target) => !existsSync(join(root, dirname(page), target)))
			.map((target) => `${page}: ${target}`),
	);
	expect(broken).toEqual([]);
	expect(pages.length).toBeGreaterThan(20);
});

test("measurements are named by date and hardware", () => {
	const names = [...new Bun.Glob("*").scanSync(join(root, "docs/measurements"))];
	expect(names.filter((name) => !/^20\d\d-\d\d-\d\d-[a-z0-9-]+\.md$/.test(name))).toEqual([]);
	for (const name of names) {
		const [title] = readFileSync(join(root, "docs/measurements", name), "utf8").split("\n");
		expect(title).toStartWith(`# Measurements of ${name.slice(0, 10)}: `);
	}
});

test("the README is short, and says what package.json and `mimo` say", () => {
	const readme = readFileSync(join(root, "README.md"), "utf8");
	expect(readme.split("\n").length).toBeLessThanOrEqual(150);
	const { description } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as { description: string };
	expect(readme.replaceAll(/\s+/g, " ")).toStartWith(`# mimo ${description} ## What loads`);
});

test("the reading order of CONTRIBUTING.md names files of the tree", () => {
	const text = readFileSync(join(root, "CONTRIBUTING.md"), "utf8");
	const list = text.slice(text.indexOf("## Read the code in this order"));
	let folder = "";
	const named = [...list.matchAll(/`((?:src|cuda)\/[\w./-]+|[\w/-]+\.ts)`/g)].map(([, name]) => {
		if (!/^(src|cuda)\//.test(name!)) return join(folder, name!);
		folder = name!.endsWith("/") ? name! : dirname(name!);
		return name!;
	});
	expect(named.length).toBeGreaterThan(10);
	expect(named.filter((path) => !existsSync(join(root, path)))).toEqual([]);
});
