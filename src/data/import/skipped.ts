/** Counts skipped rows by reason, with the first examples of each. */
import { UserError } from "../../system/errors.ts";

export interface SkippedReason {
	/** The sentence without the names and numbers of a row. */
	readonly reason: string;
	readonly count: number;
	/** The sentences of the first rows. */
	readonly examples: readonly string[];
}

/** Number of examples of a reason, and of different reasons that are counted separately. */
const EXAMPLES = 3;
const MOST_REASONS = 100;
const OTHER = "other reasons";
/** A share of skipped rows is a share of at least this many rows: a few bad rows at the start of a file end no import. */
const FIRST_ROWS = 100;

/** Most skipped rows: a number, or a share of the rows that were read. */
export type SkipLimit = { readonly rows: number } | { readonly share: number };

/** Parses "500" or "10%". Throws a UserError for other texts. */
export function parseSkipLimit(text: string): SkipLimit {
	const [, digits, percent] = /^(\d{1,15}(?:\.\d{1,6})?)(%?)$/.exec(text) ?? [];
	const number = Number(digits);
	if (percent === "%" && number <= 100) return { share: number / 100 };
	if (percent === "" && Number.isInteger(number)) return { rows: number };
	throw new UserError(`--skip-limit is ${JSON.stringify(text)}; allowed are a number of rows, or a share such as 10%.`);
}

export class SkippedRows {
	readonly #reasons: Map<string, { count: number; examples: string[] }>;
	#count: number;

	constructor(before: readonly SkippedReason[] = []) {
		this.#reasons = new Map(before.map(({ reason, count, examples }) => [reason, { count, examples: [...examples] }]));
		this.#count = before.reduce((sum, { count }) => sum + count, 0);
	}

	get count(): number {
		return this.#count;
	}

	/** Reasons in descending order of frequency. */
	get reasons(): SkippedReason[] {
		return [...this.#reasons]
			.map(([reason, { count, examples }]) => ({ reason, count, examples }))
			.sort((a, b) => b.count - a.count || (a.reason < b.reason ? -1 : 1));
	}

	add(where: string, sentence: string): void {
		this.#count++;
		const own = kindOf(sentence);
		const reason = this.#reasons.has(own) || this.#reasons.size < MOST_REASONS ? own : OTHER;
		const entry = this.#reasons.get(reason) ?? { count: 0, examples: [] };
		entry.count++;
		if (entry.examples.length < EXAMPLES) entry.examples.push(`${where}: ${sentence}`);
		this.#reasons.set(reason, entry);
	}

	/** Throws a UserError if more of `rows` rows were skipped than `limit` allows. */
	check(limit: SkipLimit, rows: number, list: string): void {
		const most = "rows" in limit ? limit.rows : limit.share * Math.max(rows, FIRST_ROWS);
		if (this.#count <= most) return;
		const { reason, examples } = this.reasons[0]!;
		const hint = reason.startsWith("the image cannot be read")
			? " Image paths are relative to the folder of their file, or to --image-root."
			: "";
		throw new UserError(
			`${this.#count} of ${rows} rows were skipped, more than --skip-limit allows; most often, as in ${examples[0]}.${hint} ${list} lists them; the same command with a higher limit continues the import.`,
		);
	}
}

/** The reason of a sentence: the sentence without names and numbers. */
function kindOf(sentence: string): string {
	return sentence
		.replace(/"(?:[^"\\]|\\.)*"/g, "…")
		.replace(/(?:[a-z][a-z0-9+.-]*:\/)?\/[^\s;:,()]+/gi, "…")
		.replace(/\b\d+\b/g, "N")
		.slice(0, 200);
}

/** The reasons and examples as lines for a terminal. */
export function skippedLines(reasons: readonly SkippedReason[]): string[] {
	return reasons.flatMap(({ reason, count, examples }) => [
		`  ${count} × ${reason}`,
		...examples.map((example) => `      ${example}`),
	]);
}
