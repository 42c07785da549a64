/**
 * A block of rows below all other output of a terminal, redrawn in place. The cursor rests at the start of the block's first row,
 * of a single row at its end, and no mode of the terminal is changed, so that a process that ends in any way leaves the terminal as
 * it was. Output that is not a terminal has no block, and its lines are unchanged.
 */

export interface TerminalStream {
	readonly isTTY?: boolean;
	readonly columns?: number;
	readonly rows?: number;
	write(text: string): unknown;
}

const clearRestOfRow = "\u001b[K";
const clearBelow = "\u001b[J";

/**
 * The beginning of a line that is written past `Terminal`, by another process too: on a terminal it clears the block, which is
 * drawn anew below the line.
 */
export const beforeLine = ({ isTTY }: Pick<TerminalStream, "isTTY">): string => (isTTY ? clearBelow : "");

/** Writes whole lines, and the block below them. */
export class Terminal {
	#block: readonly string[] = [];
	#drawnWidth = 0;

	constructor(private readonly stream: TerminalStream) {}

	get interactive(): boolean {
		return this.stream.isTTY === true;
	}

	/** Columns of a row that the block may fill: a full row would wrap on some terminals. */
	get width(): number {
		return Math.max(1, (this.stream.columns || 80) - 1);
	}

	get height(): number {
		return this.stream.rows || 24;
	}

	line(text: string): void {
		if (this.#block.length === 0) this.stream.write(`${text}\n`);
		else this.stream.write(`\r${clearBelow}${text}\n${this.#drawing()}`);
	}

	/** Replaces the block; without rows it is removed. Rows are cut to the terminal's width. */
	show(rows: readonly string[]): void {
		if (!this.interactive) return;
		const { width } = this;
		const fitted = rows.map((row) => cutTo(row, width));
		const isSame = fitted.length === this.#block.length && fitted.every((row, i) => row === this.#block[i]);
		if (isSame && width === this.#drawnWidth) return;
		this.#block = fitted;
		this.#drawnWidth = width;
		this.stream.write(fitted.length === 0 ? `\r${clearBelow}` : this.#drawing());
	}

	/** Leaves the block where it stands, drawn for the last time; lines follow below it. */
	release(): void {
		if (this.#block.length === 0) return;
		this.stream.write(`\r${this.#rows()}\n${clearBelow}`);
		this.#block = [];
	}

	#drawing(): string {
		const up = this.#block.length - 1;
		return `\r${this.#rows()}${clearBelow}${up === 0 ? "" : `\r\u001b[${up}A`}`;
	}

	/** Every row overwrites the one that was there, so that no row is empty in between. */
	#rows(): string {
		return this.#block.map((row) => `${row}${clearRestOfRow}`).join("\n");
	}
}

/** The beginning of a text that fits into `width` columns; colours count nothing. */
export function cutTo(text: string, width: number): string {
	// Bun keeps a wide character whose first half alone fits.
	const begin = Bun.sliceAnsi(text, 0, width);
	return Bun.stringWidth(begin) <= width ? begin : Bun.sliceAnsi(text, 0, width - 1);
}

/** "1:05", "2:03:04". */
export function duration(seconds: number): string {
	const whole = Math.round(seconds);
	const two = (value: number) => String(value).padStart(2, "0");
	const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
	return hours > 0 ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}
