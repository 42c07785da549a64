/** Times two ways of doing the same thing against each other, and prints the ratios. */

export interface Row {
	/** Table it belongs to. */
	readonly group: string;
	readonly operation: string;
	readonly shape: string;
	readonly threads: number;
	readonly milliseconds: number;
	readonly baseline: string;
	readonly baselineMilliseconds: number;
	/** Baseline's time over ours: above 1 we are faster. */
	readonly ratio: number;
	/** What the ratio is meant to reach; null where nothing was promised. */
	readonly target: number | null;
}

const rounds = 11;
/** Long enough for the other side's threads to stop spinning: those of OpenBLAS take 2^26 cycles, about 30 ms. */
const pauseMilliseconds = 80;
const sampleSeconds = 0.04;

function secondsOf(run: () => void, calls: number): number {
	const started = performance.now();
	for (let i = 0; i < calls; i++) run();
	return (performance.now() - started) / 1000 / calls;
}

function callsPerSample(run: () => void): number {
	run();
	let calls = 1;
	for (let seconds = secondsOf(run, 1); seconds * calls < sampleSeconds && calls < 1e6; ) {
		calls = Math.max(calls * 2, Math.min(1e6, Math.ceil(sampleSeconds / Math.max(seconds, 1e-7))));
		seconds = secondsOf(run, calls);
	}
	return calls;
}

/** Least seconds a call of each: what disturbs a machine only adds. Measured in turns, so that a slow minute meets both. */
export async function compare(ours: () => void, baseline: () => void): Promise<readonly [number, number]> {
	const sides = [ours, baseline].map((run) => ({ run, calls: callsPerSample(run), samples: [] as number[] }));
	for (let round = 0; round < rounds; round++) {
		for (const { run, calls, samples } of sides) {
			await Bun.sleep(pauseMilliseconds);
			run();
			samples.push(secondsOf(run, calls));
		}
	}
	return [Math.min(...sides[0]!.samples), Math.min(...sides[1]!.samples)];
}

/** Least seconds a call. */
export function measure(run: () => void): number {
	const calls = callsPerSample(run);
	return Math.min(...Array.from({ length: rounds }, () => secondsOf(run, calls)));
}

export function row(
	what: Pick<Row, "group" | "operation" | "shape" | "threads" | "baseline" | "target">,
	[seconds, baselineSeconds]: readonly [number, number],
): Row {
	return {
		...what,
		milliseconds: seconds * 1000,
		baselineMilliseconds: baselineSeconds * 1000,
		ratio: baselineSeconds / seconds,
	};
}

/** The rows as text, one table a group. */
export function tables(rows: readonly Row[]): string {
	const lines: string[] = [];
	for (const [group, members] of Map.groupBy(rows, (row) => row.group)) {
		lines.push("", group);
		const cells = members.map((row) => [
			row.operation,
			row.shape,
			String(row.threads),
			row.milliseconds.toFixed(3),
			row.baseline,
			row.baselineMilliseconds.toFixed(3),
			row.ratio.toFixed(2),
			row.target === null ? "" : `${row.ratio >= row.target ? "≥" : "below"} ${row.target}`,
		]);
		const all = [["operation", "shape", "threads", "ms", "against", "ms", "ratio", "wanted"], ...cells];
		const widths = all[0]!.map((_, column) => Math.max(...all.map((line) => line[column]!.length)));
		const right = [2, 3, 5, 6];
		for (const line of all) {
			const padded = line.map((cell, i) => (right.includes(i) ? cell.padStart(widths[i]!) : cell.padEnd(widths[i]!)));
			lines.push(`  ${padded.join("  ").trimEnd()}`);
		}
	}
	return lines.join("\n");
}
