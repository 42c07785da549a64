/** Logs of others: their values are text on the page, malformed lines are named, and their size is bounded. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { comparisonPage, reportPage } from "../../src/observe/page/page.ts";
import { readRunLog } from "../../src/observe/run-log/reader.ts";
import { clock, plantedRun } from "./planted-run.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-foreign-log-"));
afterAll(() => rmSync(folder, { recursive: true }));

type Entry = Readonly<Record<string, unknown>>;
const file = join(folder, "log.jsonl");
function read(entries: readonly Entry[]) {
	writeFileSync(file, entries.map((entry) => `${JSON.stringify(entry)}\n`).join(""));
	return readRunLog(file);
}
const start: Entry = { event: "start", step: 0, run: "r", train_iterations: 10, configuration: {} };
const steps = (fields: Entry = {}): Entry[] =>
	[1, 2, 3, 4].map((iteration) => ({ iteration, "lm loss": 3 - iteration / 10, elapsed_ms: 10, ...fields }));

/** Names of all elements and attributes of a page, with the text of what the browser runs. */
async function structureOf(page: string) {
	const names = new Set<string>();
	const scripts: string[] = [];
	let script = "";
	const rewriter = new HTMLRewriter()
		.on("*", {
			element(element) {
				names.add(element.tagName);
				for (const [name] of element.attributes) names.add(`${element.tagName} ${name}`);
			},
		})
		.on("script:not([type])", {
			text({ text, lastInTextNode }) {
				script += text;
				if (lastInTextNode) scripts.push(script);
			},
		});
	await rewriter.transform(new Response(page)).text();
	return { names, scripts };
}

test("no value of a log becomes an element, an attribute or a script, wherever it stands", async () => {
	const known = new Set<string>();
	const plain = readRunLog(plantedRun(folder));
	const own = await Promise.all([reportPage(plain, clock), comparisonPage([plain, plain], clock)].map(structureOf));
	for (const { names } of own) for (const name of names) known.add(name);
	const budget = { budget: 0.5, total: 5, active: 3, loss: 1 };
	for (const planted of [
		"<img src=x onerror=alert(1)>",
		'"></line></svg><svg/onload=alert(1)>',
		"\"'><x-evil a=1 b='",
		"</script><script>alert(1)</script>",
		"</title></style><script>alert(1)</script>",
		"&lt;img src=x onerror=alert(1)&gt;",
	]) {
		const fields = {
			[planted]: 1,
			[`${planted} loss`]: 2,
			[`${planted} norm`]: 2,
			time: planted,
			modules: [{ name: planted, ranks: 2, compute_ms: 3, [`${planted}_ms`]: 4, slowest_rank: 1, slowest_busy_ms: 5 }],
			tokens_per_expert: { 1: [1, 2, 3] },
			memory: [{ allocated: 1, reserved: 2, peak: 3 }],
		};
		const topology = { modules: [{ name: planted, size: 2, sizes: { [planted]: 2 }, lanes: [[0, 1]] }] };
		const log = read([
			{ ...start, time: planted, run: planted, configuration: { [planted]: planted, list: [planted] }, topology },
			...steps(fields),
			{ event: planted, step: 2, sentence: planted, time: planted },
			{ event: "failure", step: 3, sentence: planted },
			{ iteration: 4, split: planted, [planted]: 1 },
			{ iteration: 4, split: "validation", [planted]: 1, "lm loss": 2 },
			{
				event: "budgets",
				step: 4,
				budgets: [
					{ ...budget, sizes: { [planted]: 1 } },
					{ ...budget, budget: 1, sizes: { [planted]: 2 } },
				],
			},
		]);
		const named = { ...log, file: `${folder}/${planted}/log.jsonl` };
		for (const page of [reportPage(named, clock), comparisonPage([named, plain], clock)]) {
			const { names, scripts } = await structureOf(page);
			expect([...names].filter((name) => !known.has(name))).toEqual([]);
			expect(scripts).toHaveLength(1);
			expect(scripts).toEqual(own[0]!.scripts);
		}
	}
});

test.each<[string, Entry, string]>([
	["a step that is no number", { iteration: "seven" }, "iteration is not a number"],
	[
		"experts that are a number",
		{ iteration: 1, tokens_per_expert: { 1: 5 } },
		"tokens_per_expert is not counts by layer",
	],
	[
		"experts without counts",
		{ iteration: 1, tokens_per_expert: { 1: null } },
		"tokens_per_expert is not counts by layer",
	],
	["experts that are a list", { iteration: 1, tokens_per_expert: [1] }, "tokens_per_expert is not counts by layer"],
	[
		"counts that are texts",
		{ iteration: 1, tokens_per_expert: { 1: ["2"] } },
		"tokens_per_expert is not counts by layer",
	],
	[
		"a layer that is no number",
		{ iteration: 1, tokens_per_expert: { a: [1] } },
		"tokens_per_expert is not counts by layer",
	],
	["modules that are nothing", { iteration: 1, modules: [null] }, "modules is not a list of named modules"],
	["modules that are a number", { iteration: 1, modules: 5 }, "modules is not a list of named modules"],
	["a module without a name", { iteration: 1, modules: [{ ranks: 1 }] }, "modules is not a list of named modules"],
	["memory that is nothing", { iteration: 1, memory: [null] }, "memory is not a list of bytes by rank"],
	[
		"memory that is text",
		{ iteration: 1, memory: [{ allocated: "1", reserved: 1, peak: 1 }] },
		"memory is not a list of bytes",
	],
	[
		"a topology of nothing",
		{ ...start, topology: { modules: [null] } },
		"topology is not a list of modules with their ranks",
	],
	[
		"a topology without lanes",
		{ ...start, topology: { modules: [{ name: "x" }] } },
		"topology is not a list of modules",
	],
	[
		"a size that is markup",
		{ ...start, topology: { modules: [{ name: "x", size: "<b>", lanes: [] }] } },
		"topology is not",
	],
	[
		"ranks that are markup",
		{ ...start, topology: { modules: [{ name: "x", size: 1, lanes: [["<b>"]] }] } },
		"topology is not",
	],
])("%s is named with file and line", (_, entry, what) => {
	expect(() => read([start, ...steps(), entry])).toThrow(`${file}, line 6 is not a log's: ${what}`);
});

test("a layer that changes its number of experts is named", () => {
	const one = { iteration: 5, tokens_per_expert: { 3: [1, 2] } };
	expect(() => read([start, one, { iteration: 6, tokens_per_expert: { 3: [1, 2, 3] } }])).toThrow(
		`${file}, line 3: layer 3 of tokens_per_expert has another number of experts than before.`,
	);
	expect(read([start, { ...one, tokens_per_expert: null, modules: null, memory: null, topology: null }]).steps).toBe(1);
});

test("of more experts than a page has room for the most uneven layers are drawn", () => {
	const counts = (first: number, length: number) => [first, ...new Array(length - 1).fill(1)];
	const layers = Object.fromEntries([2, 9, 4].map((first, layer) => [layer, counts(first, 30_000)]));
	const page = reportPage(read([start, { iteration: 1, tokens_per_expert: layers }]), clock);
	expect(page).toContain("The most uneven 2 of 3 layers.");
	expect(page).toContain("load of the experts of layer 1");
	expect(page).not.toContain("load of the experts of layer 0");
	// More than a call takes arguments.
	const many = read([start, { iteration: 1, tokens_per_expert: { 1: counts(9, 1_000_000) } }]);
	expect(reportPage(many, clock)).toContain("The busiest is expert 0 of layer 1");
}, 60_000);

test("a line of hundreds of megabytes, or nested thousands deep, is named without being read", () => {
	const first = `${JSON.stringify(start)}\n`;
	writeFileSync(file, first);
	truncateSync(file, 3e8);
	const before = process.memoryUsage().rss;
	expect(() => readRunLog(file)).toThrow(`${file}, line 2 has more than 16777216 bytes.`);
	expect(process.memoryUsage().rss - before).toBeLessThan(2 ** 28);
	writeFileSync(file, `${first}{"x": ${"[".repeat(1000)}${"]".repeat(1000)}}\n`);
	expect(() => readRunLog(file)).toThrow(`${file}, line 2 is nested more than 64 levels deep.`);
	expect(() => readRunLog("/dev/zero")).toThrow("Cannot open /dev/zero: it is not a regular file.");
});
