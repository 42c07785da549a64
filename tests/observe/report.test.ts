/** The page of a run: what is in it, for logs that go on, are torn or long, and how it looks in a browser. */
import { afterEach, expect, test } from "bun:test";
import { appendFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { logTicks } from "../../src/observe/page/charts.ts";
import { comparisonPage, distinctNames, reportPage } from "../../src/observe/page/page.ts";
import { findLog, readRunLog } from "../../src/observe/run-log/reader.ts";
import { JsonLog } from "../../src/observe/run-log/writer.ts";
import { Series } from "../../src/observe/series.ts";
import { absent } from "../absent.ts";
import { clock, plantedRun } from "./planted-run.ts";
import { step } from "./step.ts";

const folders: string[] = [];
afterEach(() => {
	for (const folder of folders.splice(0)) rmSync(folder, { recursive: true });
});

function folderOf(): string {
	const folder = mkdtempSync(join(tmpdir(), "mimo-report-"));
	folders.push(folder);
	return folder;
}

test("a spike, a stalled rank, a stop and a resume are on the page", () => {
	const file = plantedRun(folderOf());
	const log = readRunLog(file);
	// 140 steps, and 100 after a resume from step 100.
	expect([log.steps, log.lastStep, log.damaged]).toEqual([200, 200, 0]);
	const spike = log.values.get("grad_norm")!.bins.find(({ most }) => most === 17.5)!;
	expect([spike.first, spike.last]).toEqual([95, 95]);
	// Steps that were done again are there once.
	expect(log.values.get("lm loss")!.bins.reduce((sum, { count }) => sum + count, 0)).toBe(200);
	expect(log.modules.get("language")!.streak).toMatchObject({ rank: 2, busy: 500 });
	const page = reportPage(log, clock);
	for (const text of [
		"finished",
		"200 of 200",
		"Rank 2 was the slowest in every step from",
		"resumed from checkpoints/iter_0000100",
		"SIGTERM",
		"The busiest is expert 0 of layer 3 with 2.00 times the mean",
		"6.0 MiB",
		"lm loss 2.61",
		"&lt;checkpoints&gt;",
		"image rows →",
	]) {
		expect(page).toContain(text);
	}
	expect(page).not.toContain("<checkpoints>");
	// Nothing is fetched.
	expect(page).not.toMatch(/https?:|<link|src=|import\(|fetch\(/);
	expect(page.length).toBeLessThan(2e6);
});

test("of several runs in one log the latest is drawn, and all of them when asked", () => {
	const folder = folderOf();
	const file = plantedRun(folder);
	const time = new Date(clock + 1e8).toISOString();
	const start = { event: "start", step: 0, run: "b", sentence: "new", time };
	appendFileSync(
		file,
		`${JSON.stringify(start)}\n${JSON.stringify({ iteration: 1, "lm loss": 9, elapsed_ms: 1, time })}\n`,
	);
	const log = readRunLog(file);
	expect([log.steps, log.lastStep, log.earlierRuns, log.firstTime]).toEqual([1, 1, 1, time]);
	const all = readRunLog(file, { allRuns: true });
	expect([all.steps, all.earlierRuns]).toEqual([201, 0]);
});

test("an incomplete last line is not read yet, and a silent run is marked", () => {
	const file = join(folderOf(), "run.jsonl");
	const line = (iteration: number, time: number) =>
		JSON.stringify({ iteration, "lm loss": 5, elapsed_ms: 100, time: new Date(time).toISOString() });
	writeFileSync(file, `${line(1, clock)}\nno JSON\n${line(2, clock + 100)}\n${line(3, clock)}`);
	const log = readRunLog(file);
	expect([log.steps, log.lastStep, log.damaged]).toEqual([2, 2, 1]);
	expect(reportPage(log, clock + 1000)).toContain(">running<");
	expect(reportPage(log, clock + 1000_000)).toContain("no step for 16 min 40 s: stuck, or ended without a message");
	appendFileSync(file, "\n");
	expect(readRunLog(file).lastStep).toBe(3);
});

test("values that are not finite and skipped steps become events", () => {
	const file = join(folderOf(), "run.jsonl");
	const log = new JsonLog(file);
	log.step(step({ iteration: 1, losses: { "lm loss": Number.NaN }, gradNorm: null, skipped: true }));
	log.close();
	expect(readRunLog(file).events.map(({ kind, sentence }) => [kind, sentence])).toEqual([
		["not finite", "lm loss is NaN"],
		["skipped", "the update was left out"],
	]);
});

test("a folder means its newest log, and a file that is not a log is refused", () => {
	const folder = folderOf();
	writeFileSync(join(folder, "other.json"), "{}");
	expect(() => findLog(folder)).toThrow("holds no JSON log");
	const file = plantedRun(folder);
	expect(findLog(folder)).toBe(file);
	expect(() => readRunLog(join(folder, "absent"))).toThrow("there is no such log file or run folder");
	expect(() => readRunLog(join(folder, "other.json"))).toThrow("holds no steps of a run yet");
});

test("a series keeps sums and extremes however many steps it merges", () => {
	const series = new Series();
	for (let at = 1; at <= 100_000; at++) series.add(at, at === 77_777 ? 1000 : 1);
	expect(series.bins.length).toBeLessThanOrEqual(1024);
	expect(series.bins.reduce((sum, { count }) => sum + count, 0)).toBe(100_000);
	expect(series.bins.reduce((total, { sum }) => total + sum, 0)).toBe(100_999);
	const peak = series.bins.find(({ most }) => most === 1000)!;
	expect(peak.first <= 77_777 && 77_777 <= peak.last).toBe(true);
	expect(series.bins[0]!.first).toBe(1);
	expect(series.bins.at(-1)!.last).toBe(100_000);
});

test("a long log is read in bounded memory", () => {
	const steps = process.env.MIMO_TEST_FULL === "1" ? 1_000_000 : 30_000;
	const file = join(folderOf(), "run.jsonl");
	for (let first = 1; first <= steps; first += 10_000) {
		const lines = Array.from({ length: 10_000 }, (_, i) =>
			JSON.stringify({ iteration: first + i, "lm loss": 1 / (first + i), grad_norm: 1, elapsed_ms: 100 + (i % 7) }),
		);
		appendFileSync(file, `${lines.join("\n")}\n`);
	}
	const program = `
		import { readRunLog } from "${join(import.meta.dir, "../../src/observe/run-log/reader.ts")}";
		import { reportPage } from "${join(import.meta.dir, "../../src/observe/page/page.ts")}";
		const log = readRunLog(process.argv[1]);
		const page = reportPage(log, 0);
		console.log(JSON.stringify({ steps: log.steps, page: page.length, peak: process.resourceUsage().maxRSS * 1024 }));
	`;
	const { stdout } = Bun.spawnSync([process.execPath, "-e", program, file]);
	const seen = JSON.parse(stdout.toString());
	expect(seen.steps).toBe(steps);
	expect(seen.page).toBeLessThan(2e6);
	expect(seen.peak).toBeLessThan(300 * 2 ** 20);
}, 120_000);

const hashOf = (text: string) => `'sha256-${new Bun.CryptoHasher("sha256").update(text).digest("base64")}'`;

test("the page's policy allows its own style sheet and script, and nothing that is fetched or in an attribute", () => {
	const log = readRunLog(plantedRun(folderOf()));
	for (const page of [reportPage(log, clock), comparisonPage([log, log], clock)]) {
		const policy = /<meta http-equiv="Content-Security-Policy" content="([^"]*)">/.exec(page)![1]!;
		const [, style] = /<style>(.*?)<\/style>/s.exec(page)!;
		const [script] = [...page.matchAll(/<script>(.*?)<\/script>/gs)].map(([, text]) => text!);
		expect(policy.split("; ")).toEqual([
			...["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"],
			`style-src ${hashOf(style!)}`,
			`script-src ${hashOf(script!)}`,
		]);
		// Nothing that a browser reads stands before it but the encoding.
		expect(page.indexOf("<meta http-equiv")).toBeLessThan(page.indexOf("<title>"));
		expect(page).not.toMatch(/ style="| on[a-z]+="/);
		// Each place has its rule.
		for (const [, at] of page.matchAll(/class="(?:[^"]* )?at-(\d+)"/g)) expect(style).toContain(`.at-${at} {`);
	}
});

test("charts are drawn in the markup, without a script", () => {
	const page = reportPage(readRunLog(plantedRun(folderOf())), clock).replaceAll(/<script.*?<\/script>/gs, "");
	const boxes = page.split('<div class="curves">').slice(1);
	expect(boxes).toHaveLength(8);
	for (const box of boxes)
		expect(box).toMatch(/<svg [^>]*>.*<poly(line|gon) class="(line|area) c\d" points="[\d.]+,[\d.]+ /);
});

/** Curves of the page's charts, as the pointer shows them, by the chart's label. */
function curvesOn(page: string) {
	const boxes = page.split('<div class="curves">').slice(1);
	return new Map(
		boxes.map((box) => {
			const data = JSON.parse(/<script type="application\/json">(.*?)<\/script>/.exec(box)![1]!);
			return [
				/aria-label="([^"]*)"/.exec(box)![1]!,
				data as { unit: string; curves: { name: string; first: number[]; mean: number[] }[] },
			];
		}),
	);
}

test("learning rate, throughput and validation have curves, with a logarithmic axis beside the linear one", () => {
	const page = reportPage(readRunLog(plantedRun(folderOf())), clock);
	const charts = curvesOn(page);
	const [training, validation] = charts.get("lm loss")!.curves;
	expect([training!.name, training!.first.length, validation]).toMatchObject([
		"training",
		200,
		{ name: "validation", first: [200], mean: [2.61] },
	]);
	expect(charts.get("learning rate")!.curves[0]!.mean[199]).toBe(2e-4);
	expect(charts.get("tokens/s")!.curves[0]!.mean[0]).toBe(4096);
	expect(charts.get("TFLOP/s a rank")!.curves.map(({ name }) => name)).toEqual(["radio_encoder", "language"]);
	expect(charts.get("step time of language")!.curves).toHaveLength(7);
	expect(page.match(/<div class="chart log">/g)!.length).toBe(
		page.match(/<input type="checkbox"( checked)?>/g)!.length,
	);
	// Losses alone begin with it.
	const checked = page.split('<div class="curves">').filter((one) => one.includes('checkbox" checked'));
	expect(checked.map((one) => /aria-label="([^"]*)"/.exec(one)![1])).toEqual(["lm loss"]);
	for (const [low, high] of [
		[2, 6],
		[1e-5, 3e-4],
		[0.02, 6.5],
		[1e-9, 5],
		[3, 3],
	] as const) {
		const levels = logTicks(low, high);
		expect(levels[0]!).toBeLessThanOrEqual(low);
		expect(levels.at(-1)!).toBeGreaterThanOrEqual(high);
		expect(levels.length).toBeGreaterThanOrEqual(2);
		expect(levels.length).toBeLessThanOrEqual(12);
		expect(levels).toEqual(levels.toSorted((a, b) => a - b));
	}
});

test("two runs share charts, and the differences of their configurations are listed", () => {
	const [first, second] = [folderOf(), folderOf()];
	const logs = [readRunLog(plantedRun(first)), readRunLog(plantedRun(second))];
	(logs[1]!.start as { configuration: object }).configuration = { lr: 1e-3, save: "<checkpoints>", seed: 7 };
	const page = comparisonPage(logs, clock);
	const names = logs.map(({ file }) => file.split("/").at(-2)!);
	expect(
		curvesOn(page)
			.get("lm loss")!
			.curves.map(({ name }) => name),
	).toEqual([...names, ...names.map((name) => `${name}, validation`)]);
	for (const row of ["<td>lr</td><td>0.003</td><td>0.001</td>", "<td>seed</td><td></td><td>7</td>"]) {
		expect(page).toContain(row);
	}
	expect(page).not.toContain("<td>save</td>");
	expect(distinctNames(["a/x/log.jsonl", "a/y/log.jsonl"])).toEqual(["x", "y"]);
	expect(distinctNames(["log.jsonl", "b/log.jsonl"])).toEqual(["log.jsonl", "b/log.jsonl"]);
	expect(distinctNames(["a.jsonl", "a.jsonl"])).toEqual(["a.jsonl", "a.jsonl (2)"]);
	expect(() =>
		comparisonPage(
			Array.from({ length: 8 }, () => logs[0]!),
			clock,
		),
	).toThrow("At most 7 runs");
});

test("events of every step are merged with a count, and repeated evaluations are there once", () => {
	const file = join(folderOf(), "run.jsonl");
	const log = new JsonLog(file);
	for (let iteration = 1; iteration <= 100; iteration++) {
		log.step(step({ iteration, losses: { "lm loss": Number.NaN }, gradNorm: null, skipped: true }));
		log.evaluation({ iteration, split: "validation", label: "", losses: { "lm loss": iteration } });
	}
	log.event({ kind: "stop", step: null, sentence: "done" });
	log.step(step({ iteration: 50, skipped: true }));
	log.close();
	const read = readRunLog(file);
	expect(read.events).toMatchObject([
		{ kind: "not finite", step: 1, lastStep: 100, times: 100 },
		{ kind: "skipped", step: 1, lastStep: 100, times: 100 },
		{ kind: "stop", times: 1 },
		{ kind: "skipped", step: 50, times: 1 },
	]);
	expect(read.evaluations.map((one) => one.step)).toEqual(Array.from({ length: 49 }, (_, i) => i + 1));
	expect(reportPage(read, clock)).toContain("<td>100 times, the latest: lm loss is NaN</td>");
});

/** A browser; null, after a printed skip, without one. */
function chromium(): string | null {
	const names = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];
	return names.find((name) => Bun.which(name)) ?? absent("Chromium", "Debian: apt-get install chromium-headless-shell");
}
const browser = chromium();

test.skipIf(browser === null)(
	"a browser shows the page within a second, no element exceeds a phone's or a screen's width, light and dark differ",
	() => {
		const folder = folderOf();
		const page = join(folder, "page.html");
		const probe =
			"addEventListener('load', () => { const loaded = performance.now(); const plot = [...document.querySelectorAll('.plot')].find((one) => one.checkVisibility()); const box = plot.getBoundingClientRect(); plot.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + box.width / 2 })); const shown = (kind) => getComputedStyle(document.querySelector('.chart.' + kind)).display !== 'none'; const axes = [shown('linear'), shown('log')]; document.querySelector('.axis input').click(); axes.push(shown('linear'), shown('log')); document.body.dataset.probe = [plot.querySelector('.tip').innerText.replaceAll(/\\s+/g, '_'), axes.join('_'), document.documentElement.scrollWidth > innerWidth ? 'wide' : 'fits', getComputedStyle(document.body).backgroundColor, [...document.querySelectorAll('svg')].filter((svg) => svg.checkVisibility()).every((svg) => svg.getBoundingClientRect().width > 100), loaded < 1000 ? 'quick' : loaded].join(' '); })";
		const drawn = reportPage(readRunLog(plantedRun(folder)), clock)
			.replace("script-src ", `script-src ${hashOf(probe)} `)
			.replace("</body>", `<script>${probe}</script><script>document.body.dataset.foreign = "ran"</script></body>`);
		writeFileSync(page, drawn);
		const look = (width: number, scheme: 0 | 1) => {
			const { stdout } = Bun.spawnSync([
				browser!,
				"--headless",
				"--no-sandbox",
				"--disable-gpu",
				`--user-data-dir=${join(folder, "profile")}`,
				`--window-size=${width},900`,
				`--blink-settings=preferredColorScheme=${scheme}`,
				"--dump-dom",
				page,
			]);
			expect(stdout.toString()).not.toContain("data-foreign=");
			return /data-probe="([^"]*)"/.exec(stdout.toString())?.[1] ?? "no probe";
		};
		// Step 100 and, beside it, the evaluation of step 200; a loss is logarithmic until the toggle changes the axis.
		const pointed = "step_100training2.7555validation_at_2002.61 false_true_true_false";
		const dark = "rgb(18, 22, 28)";
		const light = "rgb(246, 247, 249)";
		expect(look(1280, 1)).toBe(`${pointed} fits ${light} true quick`);
		expect(look(500, 1)).toBe(`${pointed} fits ${light} true quick`);
		expect(look(1280, 0)).toBe(`${pointed} fits ${dark} true quick`);
	},
	60_000,
);

test("every part of a step has a colour of its own", () => {
	const page = reportPage(readRunLog(plantedRun(folderOf())), clock);
	const used = [...page.matchAll(/class="(?:key|area) (c\d)"/g)].map(([, name]) => name!);
	expect(new Set(used).size).toBe(7);
	for (const name of used) expect(page.match(new RegExp(`--${name}: #`, "g"))).toHaveLength(2);
});
