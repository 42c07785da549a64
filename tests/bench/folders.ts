/** How fast four ranks write a Hugging Face folder together, against four `dd` that write as much to the same disk. */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { median } from "../../src/observe/series.ts";
import { runRanks } from "../parallel/ranks.ts";
import { type Row, row } from "./measure.ts";

const ranks = 4;
const layers = 8;
const rounds = 4;

export async function benchFolders(): Promise<Row[]> {
	const folder = mkdtempSync(join(tmpdir(), "mimo-bench-folders-"));
	try {
		const outcomes = await runRanks("../bench/folders-rank.ts", ranks, [folder, String(layers), String(rounds)]);
		const failed = outcomes.find(({ exitCode }) => exitCode !== 0);
		if (failed) throw new Error(`folders-rank.ts failed:\n${failed.stderr}`);
		const { bytes, times } = JSON.parse(outcomes[0]!.stdout) as { bytes: number; times: Record<string, number[]> };
		const group = `a folder of ${(bytes / 1e9).toFixed(1)} GB by ${ranks} ranks`;
		const about = { group, shape: "fp32", threads: 1, baseline: `${ranks} dd`, target: 0.8 };
		return ["dp", "tp"].map((layout) =>
			row({ ...about, operation: `save, ${layout} ${ranks}` }, [median(times[layout]!), median(times.dd!)]),
		);
	} finally {
		rmSync(folder, { recursive: true });
	}
}
