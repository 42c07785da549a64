/** Fifty thousand rows of JSON lines (MIMO_TEST_FULL=1: a million): rows a second, and memory that does not grow with them. */
import { afterAll, expect, test } from "bun:test";
import { appendFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { executable } from "../../commands/mimo.ts";
import { png, Scratch } from "../fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const pictures = 1000;
const counts = process.env.MIMO_TEST_FULL ? [100_000, 1_000_000] : [5_000, 50_000];

function jsonLines(rows: number): string {
	const path = scratch.file("rows.jsonl", "");
	for (let begin = 0; begin < rows; begin += 10_000) {
		const lines = Array.from({ length: Math.min(10_000, rows - begin) }, (_, i) =>
			JSON.stringify({
				id: begin + i,
				image: `pictures/${(begin + i) % pictures}.png`,
				conversations: [
					{ from: "human", value: "<image>\nWhat is in the picture? Answer with one sentence." },
					{
						from: "gpt",
						value: `A pattern of dots, number ${begin + i}, ${"and more of it ".repeat((begin + i) % 9)}.`,
					},
				],
			}),
		);
		appendFileSync(path, `${lines.join("\n")}\n`);
	}
	return path;
}

/** Seconds, and most bytes of memory of its own, of the import of a file. */
async function measured(path: string, output: string): Promise<{ seconds: number; megabytes: number }> {
	const start = performance.now();
	const child = Bun.spawn([executable, "data", "import", path, "--output", output], {
		stdout: "pipe",
		stderr: "ignore",
	});
	let most = 0;
	const watch = setInterval(async () => {
		const status = await Bun.file(`/proc/${child.pid}/status`)
			.text()
			.catch(() => "");
		most = Math.max(most, Number(/RssAnon:\s+(\d+)/.exec(status)?.[1] ?? 0) / 1000);
	}, 50);
	const [text] = await Promise.all([child.stdout.text(), child.exited]);
	clearInterval(watch);
	expect(text).toContain(`of ${/rows-(\d+)/.exec(output)![1]} rows`);
	return { seconds: (performance.now() - start) / 1000, megabytes: most };
}

test(`memory does not grow from ${counts.join(" rows to ")}`, async () => {
	for (let i = 0; i < pictures; i++) scratch.file(`pictures/${i}.png`, png(16 + (i % 8), 16, i));
	const results: { seconds: number; megabytes: number }[] = [];
	for (const rows of counts) {
		const output = join(scratch.path, `rows-${rows}`);
		const result = await measured(jsonLines(rows), output);
		rmSync(output, { recursive: true });
		results.push(result);
		const rate = Math.round(rows / result.seconds).toLocaleString("en");
		console.log(`${rows} rows: ${result.seconds.toFixed(1)} s, ${rate} rows/s, ${result.megabytes.toFixed(0)} MB`);
	}
	expect(results[1]!.megabytes).toBeLessThan(600);
	expect(results[1]!.megabytes).toBeLessThan(2 * results[0]!.megabytes + 50);
}, 600_000);
