/**
 * Messages about samples that are left out: a line a kind of mistake, with how many there are over all ranks, when the
 * first, tenth, hundredth … has come, and at the end.
 */
import { KnownNames, type SkippedKind, type SkippedTally } from "../../data/skipped-samples.ts";
import type { Observer } from "../../observe/step-report.ts";
import { exchangeTexts } from "../../parallel/exchange-texts.ts";
import type { Group } from "../../parallel/group.ts";

/** The count at which a kind is spoken of again after `said`. */
const nextCount = (said: number): number => (said === 0 ? 1 : 10 ** (Math.floor(Math.log10(said)) + 1));

export class SkippedReport {
	/** Samples of a kind that this rank had when it last told of them. */
	#told: ReadonlyMap<string, number> = new Map();
	/** Over all ranks, the same on every rank: samples of a kind, and of how many was spoken. */
	readonly #kinds = new Map<string, { reason: string; count: number; said: number }>();
	/** Several ranks may read one sample. */
	readonly #known = new KnownNames();

	constructor(
		private readonly world: Group,
		/** This rank's own; null: it reads no such data. */
		private readonly tally: SkippedTally | null,
	) {}

	/** Whether this rank has something to tell. */
	get hasNews(): boolean {
		return [...(this.tally?.counts ?? [])].some(([kind, count]) => count >= nextCount(this.#told.get(kind) ?? 0));
	}

	/** Tells what is new over all ranks, after `step`; all ranks call it together, when one of them has news. */
	tell(observer: Observer, step: number): void {
		this.#exchange();
		say(
			this.#due((count, said) => count >= nextCount(said)),
			observer,
			step,
		);
	}

	/** Tells all that was not spoken of yet; all ranks call it together. */
	tellRest(observer: Observer, step: number): void {
		say(this.rest(), observer, step);
	}

	/** Sentences of all that was not spoken of yet; all ranks call it together. */
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
		return [...this.#kinds.values()].flatMap((one) => {
			const { reason, count, said } = one;
			if (!isDue(count, said)) return [];
			one.said = count;
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
