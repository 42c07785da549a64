/**
 * The events of a tracer during a step, as numbers in flat memory, with numbered names. An event costs a tenth of a microsecond and
 * allocates no objects; the trace is assembled after the steps.
 */

export interface LoggedEvent {
	readonly row: number;
	/** Numbers of texts. */
	readonly name: number;
	readonly scope: number;
	/** Milliseconds of performance.now(). */
	readonly began: number;
	readonly ended: number;
	/** Further numbers, whose meaning depends on the row. */
	readonly details: readonly [number, number, number];
}

/** Number of values of an event: row, name, began, ended, scope, details. */
const columns = 8;
const chunkEvents = 4096;

export class EventLog {
	readonly #chunks: Float64Array[] = [];
	#chunk = new Float64Array(0);
	/** Number of used values of `#chunk`. */
	#used = 0;
	readonly #numbers = new Map<string, number>();
	readonly #texts: string[] = [];

	/** The number of a text, by which events refer to it. */
	number(text: string): number {
		const known = this.#numbers.get(text);
		if (known !== undefined) return known;
		this.#numbers.set(text, this.#texts.length);
		return this.#texts.push(text) - 1;
	}

	text(number: number): string {
		return this.#texts[number]!;
	}

	add(row: number, name: number, began: number, ended: number, scope: number, a = 0, b = 0, c = 0): void {
		if (this.#used === this.#chunk.length) {
			this.#chunk = new Float64Array(chunkEvents * columns);
			this.#chunks.push(this.#chunk);
			this.#used = 0;
		}
		const chunk = this.#chunk;
		const at = this.#used;
		chunk[at] = row;
		chunk[at + 1] = name;
		chunk[at + 2] = began;
		chunk[at + 3] = ended;
		chunk[at + 4] = scope;
		chunk[at + 5] = a;
		chunk[at + 6] = b;
		chunk[at + 7] = c;
		this.#used = at + columns;
	}

	/** The events in the order of their addition. */
	events(): LoggedEvent[] {
		return this.#chunks.flatMap((chunk) => {
			const used = chunk === this.#chunk ? this.#used : chunk.length;
			return Array.from({ length: used / columns }, (_, i) => {
				const [row, name, began, ended, scope, a, b, c] = chunk.subarray(i * columns, (i + 1) * columns);
				return { row: row!, name: name!, began: began!, ended: ended!, scope: scope!, details: [a!, b!, c!] };
			});
		});
	}
}
