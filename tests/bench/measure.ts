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
	/** The ratio that is meant to be reached; null without a goal. */
	readonly target: number | null;
}

const fewestRounds = 11;
const mostRounds = 60;
/** Rounds in which neither side's least time has fallen by a two-hundredth: by then both have met the machine at rest. */
const settledRounds = 8;
/** Long enough for the other side's threads to stop spinning: those of OpenBLAS take 2^26 cycles, about 30 ms. */
const pauseMilliseconds = 80;
const sampleSeconds = 0.04;

/** Something to time: seconds of one call, averaged over `calls` in a row. */
export type Timed = (calls: number) => number | Promise<number>;

/** `run` as one side of a comparison. */
export function timed(run: () => void): Timed {
	return (calls) => {
		const started = performance.now();
		for (let i = 0; i < calls; i++) run();
		return (performance.now() - started) / 1000 / calls;
	};
}

async function callsPerSample(side: Timed): Promise<number> {
	let calls = 1;
	for (let seconds = await side(1); seconds * calls < sampleSeconds && calls < 1e6; ) {
		calls = Math.max(calls * 2, Math.min(1e6, Math.ceil(sampleSeconds / Math.max(seconds, 1e-7))));
		seconds = await side(calls);
	}
	return calls;
}

/**
 * Least seconds a call of each: disturbances of a machine only add. Measured in turns, so that a slow minute meets
 * both, until both have settled.
 */
export async function compare(ours: Timed, baseline: Timed): Promise<readonly [number, number]> {
	const sides = [];
	for (const side of [ours, baseline]) {
		await side(1);
		sides.push({ side, calls: await callsPerSample(side), least: Number.POSITIVE_INFINITY });
	}
	let lastFall = 0;
	for (let round = 1; round <= fewestRounds || (round <= mostRounds && round - lastFall < settledRounds); round++) {
		for (const entry of sides) {
			await Bun.sleep(pauseMilliseconds);
			await entry.side(1);
			const seconds = await entry.side(entry.calls);
			if (seconds < entry.least * 0.995) lastFall = round;
			entry.least = Math.min(entry.least, seconds);
		}
	}
	return [sides[0]!.least, sides[1]!.least];
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
