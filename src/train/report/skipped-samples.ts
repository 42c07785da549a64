/**
 * Logs skipped samples: one line a kind of mistake with its count over all ranks, at the first, tenth, hundredth, … sample and at
 * the end of the run.
 */
import { KnownNames, remarks, type SkippedKind, type SkippedTally } from "../../data/skipped-samples.ts";
import type { Observer } from "../../observe/step-report.ts";
import { exchangeTexts, type Group } from "../../parallel/index.ts";

/** The count at which a kind is logged next, after a line at count `said`. */
const nextCount = (said: number): number => (said === 0 ? 1 : 10 ** (Math.floor(Math.log10(said)) + 1));

export class SkippedReport {
	/** Counts by kind that this rank has already exchanged. */
	#told: ReadonlyMap<string, number> = new Map();
	/** Counts over all ranks by kind, equal on every rank, and the count at the kind's last line (`said`). */
	readonly #kinds = new Map<string, { reason: string; count: number; said: number }>();
	/** Several ranks may read, and skip, the same sample. */
	readonly #known = new KnownNames();

	constructor(
		private readonly world: Group,
		/** This rank's skipped samples; null: it reads no such data. */
		private readonly tally: SkippedTally | null,
	) {}

	/** Whether this rank has skipped samples since the last exchange. */
	get hasNews(): boolean {
		return [...(this.tally?.counts ?? [])].some(([kind, count]) => count >= nextCount(this.#told.get(kind) ?? 0));
	}

	/** Exchanges new counts and logs what is due after `step`. Collective over the run, called when any rank has news. */
	tell(observer: Observer, step: number): void {
		this.#exchange();
		say(
			this.#due((count, said) => count >= nextCount(said)),
			observer,
			step,
		);
	}

	/** Logs all counts not yet logged. Collective over the run. */
	tellRest(observer: Observer, step: number): void {
		say(this.rest(), observer, step);
	}

	/** The lines for all counts not yet logged. Collective over the run. */
	rest(): string[] {
		const any = this.world.exchange(Int32Array.of(this.tally?.counts.size ?? 0)).some(([kinds]) => kinds !== 0);
		if (any) this.#exchange();
		return this.#due((count, said) => count > said);
	}

	#exchange(): void {
		const own = this.tally?.take() ?? [];
		this.#told = new Map(this.tally?.counts);
		for (const text of exchangeTexts(this.world, JSON.stringify(own))) {
			for (const { kind, reason, names, unnamed } of JSON.parse(text) as SkippedKind[]) {
				const more = unnamed + names.filter((name) => this.#known.add(name)).length;
				if (more === 0) continue;
				const { count, said } = this.#kinds.get(kind) ?? { count: 0, said: 0 };
				this.#kinds.set(kind, { reason, count: count + more, said });
			}
		}
	}

	#due(isDue: (count: number, said: number) => boolean): string[] {
		return [...this.#kinds].flatMap(([kind, one]) => {
			const { reason, count, said } = one;
			if (!isDue(count, said) || (kind === remarks && said > 0)) return [];
			one.said = count;
			if (kind === remarks) return [reason];
			return [count === 1 ? `1 sample is left out: ${reason}` : `${count} samples are left out, the last: ${reason}`];
		});
	}
}

function say(sentences: readonly string[], observer: Observer, step: number): void {
	for (const sentence of sentences) {
		observer.note(sentence);
		observer.event?.({ kind: "data", step, sentence });
	}
}
