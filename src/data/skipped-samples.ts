/**
 * Counts skipped samples by kind of mistake: reasons that differ only in names and numbers are one kind. A remark about samples
 * that are used nevertheless is a kind too.
 */
import { warn } from "../observe/messages.ts";
import type { SkippedSample } from "./energon/loader/thread.ts";

/** Samples of a kind that were not handed over before. */
export interface SkippedKind {
	/** The reason without what differs from sample to sample. */
	readonly kind: string;
	/** That of the latest sample. */
	readonly reason: string;
	/** Digests of the samples' names. */
	readonly names: readonly string[];
	/** Further samples, without known names. */
	readonly unnamed: number;
}

/** Further kinds are counted together. */
const mostKinds = 100;
/** Names that are remembered; samples beyond count each time that they are read. */
const mostNames = 100_000;

const others = "other reasons";

/** The kind of remarks: a run logs the first remark alone. */
export const remarks = "remarks";

/** The names already counted. */
export class KnownNames {
	readonly #names = new Set<string>();

	/** Whether a name is new; always true once there is no room to remember names. */
	add(name: string): boolean {
		if (this.#names.has(name)) return false;
		if (this.#names.size < mostNames) this.#names.add(name);
		return true;
	}
}

export class SkippedTally {
	readonly #fresh = new Map<string, { reason: string; names: string[]; unnamed: number }>();
	/** Samples of every kind so far. */
	readonly #counts = new Map<string, number>();
	readonly #known = new KnownNames();

	/** `onUnlisted`: hears why a sample could not be written to the list of skipped samples. */
	constructor(readonly onUnlisted: (sentence: string) => void = warn) {}

	add({ reason, samples }: Pick<SkippedSample, "reason" | "samples">): void {
		const own = kindOf(reason);
		const kind = this.#counts.has(own) || this.#counts.size < mostKinds ? own : others;
		const names = samples
			.map((sample) => Bun.hash.wyhash(JSON.stringify(sample)).toString(36))
			.filter((name) => this.#known.add(name));
		// A step that was given no sample has lost one that is not known.
		const unnamed = samples.length === 0 ? 1 : 0;
		if (names.length + unnamed === 0) return;
		const fresh = this.#fresh.get(kind) ?? { reason, names: [], unnamed: 0 };
		fresh.reason = reason;
		fresh.names.push(...names);
		fresh.unnamed += unnamed;
		this.#fresh.set(kind, fresh);
		this.#counts.set(kind, (this.#counts.get(kind) ?? 0) + names.length + unnamed);
	}

	/** Takes a sentence about samples that are used nevertheless; only the first is kept. */
	remark(sentence: string): void {
		if (this.#counts.has(remarks)) return;
		this.#counts.set(remarks, 1);
		this.#fresh.set(remarks, { reason: sentence, names: [], unnamed: 1 });
	}

	/** Samples of every kind. */
	get counts(): ReadonlyMap<string, number> {
		return this.#counts;
	}

	/** Takes the kinds that were added since the last call. */
	take(): SkippedKind[] {
		const taken = [...this.#fresh].map(([kind, fresh]) => ({ kind, ...fresh }));
		this.#fresh.clear();
		return taken;
	}
}

/** The kind of a reason: its sentence without names and numbers, equal for two samples with the same mistake. */
function kindOf(reason: string): string {
	return reason
		.replace(/^Sample [^\s:]+/, "Sample")
		.replaceAll(/"(?:[^"\\]|\\.)*"/g, '""')
		.replaceAll(/\d+/g, "0");
}
