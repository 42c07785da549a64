/**
 * The records of a run: JSON log, TensorBoard, MLflow, Weights & Biases, trace. A record that cannot be opened, or not begin,
 * refuses the run. Once training goes on, no record ends it, because its steps are worth more: the first failure of each
 * record is a warning, every entry is tried anew, and the end says which records are incomplete.
 */
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import type { Observer } from "./step-report.ts";

interface Gap {
	/** Entries that could not be written. */
	entries: number;
	/** Steps done when the first one could not; null: not known. */
	readonly after: number | null;
}

export class RunRecords {
	readonly #gaps = new Map<string, Gap>();

	/** `warn`: told of the first failure of each record. */
	constructor(private readonly warn: (sentence: string) => void) {}

	/** Passes everything on to a record of this name; what it throws once the run has begun is a gap in it. */
	keep(name: string, record: Observer): Observer {
		let step = 0;
		const attempt = (write: () => void) => this.#attempt(name, step, write);
		return {
			begin: (start) => {
				step = start.step;
				record.begin?.(start);
			},
			step: (report) => {
				attempt(() => record.step(report));
				step = report.iteration;
			},
			evaluation: (report) => attempt(() => record.evaluation(report)),
			note: (sentence) => attempt(() => record.note(sentence)),
			timers: (report) => attempt(() => record.timers?.(report)),
			event: (event) => {
				if (event.kind === "start") record.event?.(event);
				else attempt(() => record.event?.(event));
			},
			close: () => attempt(() => record.close()),
		};
	}

	#attempt(name: string, step: number, write: () => void): void {
		try {
			write();
		} catch (error) {
			if (!(error instanceof UserError)) throw error;
			this.miss(name, step, error.message);
		}
	}

	/** An entry of a record after `step` (null: any) is missing, for the reason that a sentence gives. */
	miss(name: string, step: number | null, sentence: string): void {
		const gap = this.#gaps.get(name);
		if (gap !== undefined) {
			gap.entries++;
			return;
		}
		this.#gaps.set(name, { entries: 1, after: step });
		this.warn(`${sentence} Training goes on.`);
	}

	/** A sentence for each record with a gap. */
	gaps(): string[] {
		return [...this.#gaps].map(([name, { entries, after }]) => {
			const first = after === null ? "" : `, the first after step ${after}`;
			return `The ${name} is incomplete: ${counted(entries, "entry", "entries")} could not be written${first}.`;
		});
	}
}
