/** What `bun test` prints about several files, as a result of each. */

export interface FileResult {
	readonly file: string;
	readonly passed: number;
	readonly failed: number;
	readonly skipped: number;
	/** Of its tests; what comes before and after them is not counted. */
	readonly seconds: number;
	/** Why the file has failed; null: it has not. */
	readonly problem: string | null;
	readonly output: string;
}

/** Seconds that a line such as "(pass) name [1.25s]" names. */
function secondsOf(line: string): number {
	const [, value, unit] = /\[([\d.]+)(ms|s)\]$/.exec(line) ?? [];
	return value === undefined ? 0 : Number(value) / (unit === "ms" ? 1000 : 1);
}

/** The last lines before each test that failed, and of what a file printed where it ended early. */
export function failureText({ output, problem }: FileResult, lines: number): string {
	const blocks: string[] = [];
	let block: string[] = [];
	const close = () => {
		blocks.push(
			block
				.slice(-lines)
				.map((line) => line.slice(0, 500))
				.join("\n"),
		);
		block = [];
	};
	for (const line of output.split("\n")) {
		if (/^\((pass|skip|todo)\) /.test(line)) block = [];
		else if (line !== "") block.push(line);
		if (line.startsWith("(fail) ")) close();
	}
	if (blocks.length === 0 || problem?.startsWith("ended early")) close();
	return blocks.filter((text) => text !== "").join("\n");
}

/**
 * Splits the output of `bun test` at the lines that name a file. `ended`: exit code or signal of the process, or why it was
 * ended. `left`: files that the process has not come to because it ended before.
 */
export function fileResults(
	output: string,
	files: readonly string[],
	ended: string | number,
): { results: FileResult[]; left: string[] } {
	const complete = /^Ran \d+ tests? across/m.test(output);
	const sections = new Map<string, string[]>();
	let current: string[] = [];
	for (const line of output.split("\n")) {
		// Behind the last file all that failed or was skipped is listed once more.
		if (/^\d+ tests? (failed|skipped|todo):$/.test(line)) break;
		const file = files.find((one) => line === `${one}:`);
		if (file !== undefined) {
			// What was printed before the first name belongs to that file.
			current = sections.size === 0 ? current : [];
			sections.set(file, current);
		} else current.push(line);
	}
	const last = [...sections.keys()].at(-1);
	const results = [...sections].map(([file, lines]) => {
		const count = (word: string) => lines.filter((line) => line.startsWith(`(${word}) `)).length;
		const counts = { passed: count("pass"), failed: count("fail"), skipped: count("skip") + count("todo") };
		const crashed = !complete && file === last ? `ended early (${ended})` : null;
		const empty = counts.passed + counts.failed + counts.skipped === 0 ? "ran no test" : null;
		const problem = crashed ?? (counts.failed > 0 ? `${counts.failed} failed` : empty);
		const seconds = lines.reduce((sum, line) => sum + secondsOf(line), 0);
		return { file, ...counts, failed: counts.failed + (crashed ? 1 : 0), seconds, problem, output: lines.join("\n") };
	});
	const left = files.filter((file) => !sections.has(file));
	if (sections.size > 0 && !complete) return { results, left };
	const silent = left.map((file) => ({
		...{ file, passed: 0, failed: 1, skipped: 0, seconds: 0 },
		...{ problem: `printed nothing (${ended})`, output: sections.size === 0 ? output : "" },
	}));
	return { results: [...results, ...silent], left: [] };
}
