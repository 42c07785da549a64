/** Collectives of two ranks of this host, against memcpy, a number of microseconds, and Gloo where PyTorch is there. */
import { join } from "node:path";
import { runRanks } from "../parallel/ranks.ts";
import { type Row, row } from "./measure.ts";

const megabyte = 1 << 20;
const sizes = [1024, 65536, megabyte, 16 * megabyte] as const;
/** Most time that 1 KB may take. */
const smallSeconds = 100e-6;
const group = "collectives of 2 ranks, a thread each";

const sizeName = (bytes: number) => (bytes >= megabyte ? `${bytes / megabyte} MB` : `${bytes / 1024} KB`);

/** `python`: an interpreter with PyTorch; null: no comparison. */
export async function benchCollectives(python: string | null): Promise<Row[]> {
	const outcomes = await runRanks("../bench/collectives-rank.ts", 2);
	const failed = outcomes.find(({ exitCode }) => exitCode !== 0);
	if (failed) throw new Error(`collectives-rank.ts failed:\n${failed.stderr}`);
	const seconds = JSON.parse(outcomes[0]!.stdout) as Record<string, number>;
	const about = (bytes: number) => ({ group, operation: "all-reduce", shape: sizeName(bytes), threads: 1 });
	const rows = sizes.map((bytes) => {
		const ours = seconds[`all-reduce ${bytes}`]!;
		// Small messages are all latency: they are held to a number instead.
		return bytes === 1024
			? row({ ...about(bytes), baseline: "100 µs", target: 1 }, [ours, smallSeconds])
			: row({ ...about(bytes), baseline: "memcpy", target: bytes === 16 * megabyte ? 0.5 : null }, [
					ours,
					seconds[`memcpy ${bytes}`]!,
				]);
	});
	const gloo = python && askGloo(python);
	if (!gloo) return rows;
	const against = sizes.map((bytes) =>
		row({ ...about(bytes), baseline: "Gloo", target: bytes === 1024 || bytes === 16 * megabyte ? 3 : null }, [
			seconds[`all-reduce ${bytes}`]!,
			gloo[bytes]!,
		]),
	);
	return [...rows, ...against];
}

/** Least seconds of an all-reduce by its bytes. */
function askGloo(python: string): Record<number, number> {
	const program = join(import.meta.dir, "pytorch_gloo.py");
	const child = Bun.spawnSync([python, program, ...sizes.map(String)], { stderr: "pipe", timeout: 120_000 });
	if (!child.success) throw new Error(`pytorch_gloo.py failed:\n${child.stderr}`);
	return JSON.parse(child.stdout.toString()) as Record<number, number>;
}
