/**
 * The records of a run: JSON log, TensorBoard, MLflow, Weights & Biases, trace. A record that cannot be opened or begun
 * prevents the run. During training a failing record does not end the run: its first failure is a warning, each further entry is
 * attempted, and a message at the end names the incomplete records.
 */
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import type { Observer } from "./step-report.ts";

interface Gap {
	/** Number of entries that could not be written. */
	entries: number;
	/** Number of steps done before the first missing entry; null: unknown. */
	readonly after: number | null;
}

export class RunRecords {
	readonly #gaps = new Map<string, Gap>();

	/** `warn`: called at the first failure of each record. */
	constructor(private readonly warn: (sentence: string) => void) {}

	/** Forwards calls to a record; after the run has begun, its errors count as missing entries. */
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

	/** Counts a missing entry of a record after `step` (null: unknown); `sentence`: the reason. */
	miss(name: string, step: number | null, sentence: string): void {
		const gap = this.#gaps.get(name);
		if (gap !== undefined) {
			gap.entries++;
			return;
		}
		this.#gaps.set(name, { entries: 1, after: step });
		this.warn(`${sentence} Training continues.`);
	}

	/** A sentence for each record with a gap. */
	gaps(): string[] {
		return [...this.#gaps].map(([name, { entries, after }]) => {
			const first = after === null ? "" : `, the first after step ${after}`;
			return `The ${name} is incomplete: ${counted(entries, "entry", "entries")} could not be written${first}.`;
		});
	}
}
