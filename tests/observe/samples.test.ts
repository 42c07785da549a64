/** Held-out samples in a run's log, and their pictures and answers on the page. */
import { afterAll, expect, test } from "bun:test";
import { appendFileSync } from "node:fs";
import { join } from "node:path";
import { thumbnailOf } from "../../src/data/vision-language/pixels.ts";
import { reportPage } from "../../src/observe/page/page.ts";
import { readRunLog } from "../../src/observe/run-log/reader.ts";
import { JsonLog, samplesEvent } from "../../src/observe/run-log/writer.ts";
import { png, Scratch } from "../data/fixtures.ts";
import { step } from "./step.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

const picture = png(4, 4).toString("base64");
const sample = { picture, prompt: "What is it?", truth: "a cat", answer: "a cat" };

/** The log of a run of one step with an event of samples. */
function logWith(name: string, event: ReturnType<typeof samplesEvent>): string {
	const file = join(folder.path, name);
	const log = new JsonLog(file, () => new Date(0));
	log.event({ kind: "start", step: 0, sentence: "new run" });
	log.step(step({ iteration: 1 }));
	log.event(event);
	log.close();
	return file;
}

test("samples are drawn with picture, question and answers, every text escaped", () => {
	const wrong = { picture: null, prompt: "", truth: "a <dog>", answer: '"><script>alert(1)</script>' };
	const file = logWith("drawn.jsonl", samplesEvent(1, "Half are right.", [sample, wrong]));
	const { samples, events } = readRunLog(file);
	expect(samples).toEqual({ step: 1, sentence: "Half are right.", records: [sample, wrong] });
	expect(events.map(({ kind }) => kind)).toEqual(["start"]);
	const page = reportPage(readRunLog(file), 0);
	expect(page).toContain("<h2>Held-out samples after step 1</h2><p>Half are right.</p>");
	expect(page).toContain(`<img alt="picture of the sample" src="data:image/png;base64,${picture}">`);
	expect(page).toContain('<p class="right">model: <b>a cat</b></p></figcaption>');
	expect(page).toContain(
		'<p class="wrong">model: <b>&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;</b></p><p>data: <b>a &lt;dog&gt;</b></p>',
	);
	expect(page).toContain("default-src 'none'; img-src data:;");
});

test("an event holds few samples of bounded length", () => {
	const long = { ...sample, picture: "A".repeat(2 ** 20), answer: "x".repeat(1e5) };
	const { records } = readRunLog(logWith("long.jsonl", samplesEvent(1, "", Array(40).fill(long)))).samples!;
	expect(records).toHaveLength(12);
	expect(records[0]).toEqual({ ...sample, picture: null, answer: `${"x".repeat(2000)} …` });
});

test("samples of another program's log are checked", () => {
	const file = logWith("foreign.jsonl", samplesEvent(1, "", [sample]));
	const samples = [
		{ ...sample, picture: '"onerror="alert(1)' },
		{ ...sample, picture: 3, answer: "y".repeat(5000) },
		{ ...sample, answer: 3 },
		null,
		"text",
	];
	appendFileSync(file, `${JSON.stringify({ event: "samples", step: 1, sentence: 7, samples })}\n`);
	const read = readRunLog(file).samples!;
	expect(read.sentence).toBe("");
	expect(read.records).toEqual([
		{ ...sample, picture: null },
		{ ...sample, picture: null, answer: `${"y".repeat(2000)} …` },
	]);
	appendFileSync(file, `${JSON.stringify({ event: "samples", step: 1, samples: { length: 2 } })}\n`);
	expect(readRunLog(file).samples!.records).toEqual([]);
	expect(reportPage(readRunLog(file), 0)).not.toContain("Held-out samples");
});

test("a thumbnail has the means of squares of pixels, the last of them cut", () => {
	const pixels = Uint8Array.from({ length: 3 * 5 * 2 }, (_, i) => 10 * Math.floor(i / 3) + (i % 3));
	expect(thumbnailOf({ width: 5, height: 2, channels: 3, pixels }, 3)).toEqual({
		...{ width: 3, height: 1, channels: 3 },
		pixels: Uint8Array.of(30, 31, 32, 50, 51, 52, 65, 66, 67),
	});
	expect(thumbnailOf({ width: 5, height: 2, channels: 3, pixels }, 5).pixels).toEqual(pixels);
});
