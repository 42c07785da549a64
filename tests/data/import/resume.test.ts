/** A killed import goes on from its last full shard, and ends with the same bytes as one that was left alone. */
import { afterAll, describe, expect, test } from "bun:test";
import { existsSync, readFileSync, utimesSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { ownHolder } from "../../../src/checkpoint/native/writer-lock.ts";
import type { ImportOptions } from "../../../src/data/import/import.ts";
import { JOURNAL } from "../../../src/data/import/journal.ts";
import { openSource } from "../../../src/data/import/open-source.ts";
import { noColumns } from "../../../src/data/import/row.ts";
import { png, Scratch, tar } from "../fixtures.ts";
import { filesOf, golden, importing, membersOf } from "./importing.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const rows = 40;
const lines: string[] = [];
for (let i = 0; i < rows; i++) {
	scratch.file(`pictures/${String(i).padStart(2, "0")}.png`, png(4 + (i % 5), 4, i));
	scratch.file(`pictures/${String(i).padStart(2, "0")}.txt`, `picture ${i}`);
	const image = i % 9 === 4 ? `pictures/none-${i}.png` : `pictures/${String(i).padStart(2, "0")}.png`;
	lines.push(JSON.stringify({ image, caption: `picture ${i}` }));
}
const jsonl = scratch.file("rows.jsonl", `${lines.join("\n")}\n`);
const list = scratch.file("rows.json", `[${lines.join(",\n")}]`);
const csv = scratch.file(
	"rows.csv",
	`image,caption\n${Array.from({ length: rows }, (_, i) => `pictures/${String(i).padStart(2, "0")}.png,"a\n${i}"`).join("\n")}\n`,
);
const tars = scratch.file(
	"rows.tar",
	tar(
		Array.from({ length: rows }, (_, i) => [
			[`${i}.png`, png(4, 4, i)] as const,
			[`${i}.txt`, `picture ${i}`] as const,
		]).flat(),
	),
);

/** Kills the import after each of these numbers of images, then lets it end. */
function killedImport(path: string, output: string, options: Partial<ImportOptions>, kills: readonly number[]): void {
	const run = (count: number) =>
		Bun.spawnSync(
			[process.execPath, join(import.meta.dir, "child.ts"), path, output, JSON.stringify(options), String(count)],
			{
				stdout: "pipe",
				stderr: "pipe",
			},
		);
	for (const count of kills) expect(run(count).signalCode).toBe("SIGKILL");
	const last = run(1e9);
	expect([last.stderr.toString(), last.exitCode]).toEqual(["", 0]);
}

describe("killed and continued", () => {
	const skipLimit = { share: 0.5 };
	const cases: readonly (readonly [name: string, path: string, Partial<ImportOptions>, kills: readonly number[]])[] = [
		["JSON lines, in parts", jsonl, { shardSamples: 4, shares: [6, 2, 2], skipLimit }, [9, 12]],
		["a JSON list, shuffled", list, { shardSamples: 2, shuffle: 7, skipLimit }, [20]],
		["a table", csv, { shardSamples: 7 }, [18, 9]],
		["a tar file, by bytes", tars, { shardBytes: 20_000 }, [25, 3]],
		["a folder of pictures", join(scratch.path, "pictures"), { shardSamples: 3 }, [11]],
		["Parquet", join(golden, "captions.parquet"), { shardSamples: 1 }, [3]],
		["Arrow", join(golden, "captions"), { shardSamples: 1 }, [4]],
	];
	// Each kill is a process of its own; the forms of many files are covered by their positions below.
	for (const [name, path, options, kills] of process.env.MIMO_TEST_FULL ? cases : cases.slice(0, 2)) {
		test(name, async () => {
			const [whole, killed] = ["whole", "killed"].map((kind) => join(scratch.path, `${kind} ${name}`)) as [
				string,
				string,
			];
			await importing(path, whole, options);
			killedImport(path, killed, options, kills);
			expect(filesOf(killed)).toEqual(filesOf(whole));
			expect(Object.keys(filesOf(whole)).filter((file) => /\.(?:part|tmp)$/.test(file))).toEqual([]);
		});
	}
});

describe("a source read from any position gives the later rows", () => {
	const pictures = join(scratch.path, "pictures");
	for (const path of [jsonl, list, csv, tars, pictures, join(golden, "captions.parquet"), join(golden, "talk")]) {
		test(path.split("/").at(-1)!, async () => {
			const open = {
				paths: [path],
				from: null,
				columns: noColumns,
				table: { header: true, delimiter: null },
				imageRoot: null,
				dataset: null,
			};
			const { source } = await openSource(open);
			const all = await Array.fromAsync(source.rows([]));
			expect(all.length).toBeGreaterThan(2);
			for (const i of [0, 1, Math.floor(all.length / 2), all.length - 1]) {
				expect(await Array.fromAsync(source.rows(all[i]!.next))).toEqual(all.slice(i + 1));
			}
		});
	}
});

test("parts have their shares and each sample once, also with shuffling", async () => {
	const inOrder = join(scratch.path, "in order");
	await importing(jsonl, inOrder, { shares: [8, 1, 1], skipLimit: { share: 0.5 } });
	const output = join(scratch.path, "shuffled");
	const { parts } = await importing(jsonl, output, {
		shares: [8, 1, 1],
		shuffle: 3,
		shardSamples: 4,
		skipLimit: { share: 0.5 },
	});
	expect(parts.map(({ part, samples }) => [part, samples])).toEqual([
		["train", 29],
		["val", 4],
		["test", 3],
	]);
	const contents = (folder: string) =>
		Object.entries(membersOf(folder)).map(([name, value]) => `${name.replace(/-\d+\.tar/, "")} ${value}`);
	expect(contents(output).sort()).toEqual(contents(inOrder).sort());
	expect(contents(output)).not.toEqual(contents(inOrder));
});

describe("a folder of another import", () => {
	test("is not continued with other data or settings", async () => {
		const output = join(scratch.path, "settings");
		const own = scratch.file("own.jsonl", readFileSync(jsonl));
		const options = { skipLimit: { share: 0.5 } };
		await importing(own, output, options);
		expect((await importing(own, output, options)).wasDone).toBe(true);
		await expect(importing(own, output, { ...options, shuffle: 1 })).rejects.toThrow(
			"shuffle was null and is 1; name a new folder",
		);
		utimesSync(own, 1, 1);
		await expect(importing(own, output, options)).rejects.toThrow("settings holds another import: data was ");
	});

	test("with other files is left unchanged", async () => {
		const file = scratch.file("other/notes.txt", "mine");
		await expect(importing(jsonl, join(file, ".."))).rejects.toThrow("is not empty and holds no import");
		expect(existsSync(file)).toBe(true);
	});

	test("with a damaged journal is named", async () => {
		const file = scratch.file(`broken/${JOURNAL}`, "{}");
		await expect(importing(jsonl, join(file, ".."))).rejects.toThrow(/broken\/import.json is damaged at version/);
		writeFileSync(file, "{");
		await expect(importing(jsonl, join(file, ".."))).rejects.toThrow("cannot be read");
	});
});

test("the limit of skipped rows ends an import, and a higher limit continues it", async () => {
	const output = join(scratch.path, "limited");
	await expect(importing(jsonl, output, { skipLimit: { rows: 2 } })).rejects.toThrow(
		/^3 of 23 rows were skipped, more than --skip-limit allows; most often, as in .*: the image cannot be read/,
	);
	await Bun.sleep(0);
	const { skipped, samples } = await importing(jsonl, output, { skipLimit: { rows: 4 } });
	expect([samples, skipped[0]!.count, skipped[0]!.examples.length]).toEqual([36, 4, 3]);
	const listed = readFileSync(join(output, "skipped.jsonl"), "utf8").trim().split("\n");
	expect(listed).toHaveLength(4);
	expect(JSON.parse(listed[0]!).where).toBe(`${jsonl}, line 5`);
});

test("two imports into one folder take turns", async () => {
	const options = { shardSamples: 2, skipLimit: { share: 0.5 } };
	const [alone, shared] = [join(scratch.path, "alone"), join(scratch.path, "shared")];
	await importing(jsonl, alone, options);
	const said: string[] = [];
	const both = ["a", "b"].map(() => importing(jsonl, shared, { ...options, report: (line) => said.push(line) }));
	const results = await Promise.all(both);
	expect(results.map(({ wasDone }) => wasDone).sort()).toEqual([false, true]);
	expect(said.filter((line) => /writes to .*shared \(--output\): waiting/.test(line))).toHaveLength(1);
	expect(filesOf(shared)).toEqual(filesOf(alone));
});

test("a folder of an import that was killed at its beginning is accepted", async () => {
	const folder = join(scratch.path, "begun");
	scratch.file("begun/writer-1.lock", "");
	const text = `000000000000\n${JSON.stringify({ ...ownHolder("other"), process: { ...ownHolder("other").process, pid: 2 ** 30 } })}\n`;
	writeFileSync(join(folder, "writer-1.lock"), text);
	await importing(jsonl, folder, { skipLimit: { share: 0.5 } });
	expect(existsSync(join(folder, "writer-1.lock"))).toBeFalse();
});
