/** Every citation of the reference names a page and a section that exist, in one spelling: docs/spec/PAGE.md §SECTION. */
import { describe, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";

const root = join(import.meta.dir, "..");
const folder = join(root, "docs/spec");
const pages = readdirSync(folder).filter((name) => name.endsWith(".md") && name !== "README.md");
const names = pages.map((page) => page.slice(0, -".md".length));

/** Numbers of the sections of a page, such as "3.6" and "G4". */
function sectionsOf(text: string): string[] {
	return [...text.matchAll(/^#{2,3} (G?\d+(?:\.\d+)?)\.? /gm)].map(([, number]) => number!);
}

const sections = new Map(pages.map((page) => [page, sectionsOf(readFileSync(join(folder, page), "utf8"))]));

/** Comments' lines joined, so that a citation that goes on in the next line reads like any other. */
function joinLines(text: string): string {
	return text.replace(/\n[ \t]*(?:\*(?!\/)|\/\/+)?[ \t]*/g, " ");
}

const section = String.raw`§G?\d+(?:\.\d+)*`;
const list = new RegExp(String.raw`docs/spec/([\w-]+\.md)((?: ${section}(?:(?:, | and |–)${section})*)?)`, "g");

/** Faults of the citations in a text; empty: all are right. */
export function citationFaults(text: string): string[] {
	const joined = joinLines(text);
	const faults: string[] = [];
	for (const [whole, page, cited] of joined.matchAll(list)) {
		const known = sections.get(page!);
		if (known === undefined && page !== "README.md") faults.push(`${whole}: there is no such page`);
		for (const [number] of cited!.matchAll(/G?\d+(?:\.\d+)*/g)) {
			if (known && !known.includes(number)) faults.push(`${whole}: the page has no section ${number}`);
		}
	}
	const rest = joined.replace(list, (whole) => " ".repeat(whole.length));
	const otherSpellings = [
		new RegExp(String.raw`\bspec:? (?:${names.join("|")})\b`, "gi"),
		/\bspec:? \d/gi,
		new RegExp(String.raw`(?<![\w/-])(?:${names.join("|")})(?:\.md)? (?=§|\d+\.\d)`, "g"),
	];
	for (const pattern of otherSpellings) {
		for (const { 0: found, index } of rest.matchAll(pattern)) {
			faults.push(`"${joined.slice(index, index + found.length + 12)}" is not spelled docs/spec/PAGE.md §SECTION`);
		}
	}
	// A section alone refers to the page that was cited last.
	for (const { 0: found, index } of rest.matchAll(new RegExp(section, "g"))) {
		const page = [...joined.slice(0, index).matchAll(/docs\/spec\/([\w-]+\.md)/g)].at(-1)?.[1];
		if (page === undefined) faults.push(`${found} is cited without a page`);
		else if (!sections.get(page)?.includes(found.slice(1))) faults.push(`${page} has no section ${found.slice(1)}`);
	}
	return faults;
}

test("what is wrong is found", () => {
	expect(citationFaults("/** A (docs/spec/runtime.md §3.6, §4.4). */")).toEqual([]);
	expect(citationFaults(" * The router (docs/spec/language-model.md\n * §4.2–§4.4) and its bias (§4.3).")).toEqual([]);
	expect(citationFaults("(docs/spec/runtime.md §99.1)")).toEqual([
		"docs/spec/runtime.md §99.1: the page has no section 99.1",
	]);
	expect(citationFaults("(docs/spec/nothing.md §1)")).toEqual(["docs/spec/nothing.md §1: there is no such page"]);
	expect(citationFaults("(docs/spec/runtime.md §3.6; §99)")).toEqual(["runtime.md has no section 99"]);
	for (const other of ["(spec runtime 3.6)", "(runtime.md §3.6)", "(spec 3.6)", "(§3.6)"]) {
		expect(citationFaults(other).length).toBeGreaterThan(0);
	}
});

describe("sources cite sections that exist:", () => {
	const files = ["src", "cuda", "tests", "examples"].flatMap((part) => [
		...new Bun.Glob("**/*.{ts,cpp,h,cu,cuh,def,txt,py,sh,yaml}").scanSync({ cwd: join(root, part), absolute: true }),
	]);
	const cited = files
		.map((file) => relative(root, file))
		.filter((file) => file !== relative(root, import.meta.path) && !file.startsWith("tests/golden/"))
		.map((file) => [file, readFileSync(join(root, file), "utf8")] as const);

	test("all of them", () => {
		expect(cited.flatMap(([file, text]) => citationFaults(text).map((fault) => `${file}: ${fault}`))).toEqual([]);
		expect(cited.filter(([, text]) => text.includes("docs/spec/")).length).toBeGreaterThan(150);
	});

	test("every page is cited", () => {
		const all = cited.map(([, text]) => text).join("\n");
		expect(pages.filter((page) => !all.includes(`docs/spec/${page}`))).toEqual([]);
	});
});

describe("the pages", () => {
	for (const page of pages) {
		const text = readFileSync(join(folder, page), "utf8");
		test(`${page}: sections have different numbers, and references lead to sections`, () => {
			const own = sections.get(page)!;
			expect(new Set(own).size).toBe(own.length);
			const others = [...text.matchAll(/([\w-]+\.md) §(G?\d+(?:\.\d+)*)/g)];
			const inside = [...text.matchAll(/\((\d+\.\d+)\)/g)].map(([whole, number]) => [whole, page, number!] as const);
			const broken = [...others, ...inside].filter(([, to, number]) => !sections.get(to!)?.includes(number!));
			expect(broken.map(([whole]) => whole)).toEqual([]);
		});
	}

	test("the list of pages is whole", () => {
		const index = readFileSync(join(folder, "README.md"), "utf8");
		expect(pages.filter((page) => !index.includes(`(${page})`))).toEqual([]);
	});
});
