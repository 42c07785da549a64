/** A terminal's screen, as far as this program writes to one: text, carriage return, line feed, clearing, moving up, colours. */

export class Screen {
	readonly isTTY = true;
	/** Everything that was written. */
	written = "";
	/** Rows from the first one that was written; those above the last `rows` have scrolled away. */
	readonly #lines: string[][] = [[]];
	#row = 0;
	#column = 0;
	/** The begin of a sequence whose rest has not been written yet. */
	#unended = "";

	constructor(
		public columns: number,
		public rows: number,
	) {}

	/** The rows without trailing spaces, of the whole output. */
	get text(): string[] {
		const rows = this.#lines.map((cells) =>
			Array.from(cells, (cell) => cell ?? " ")
				.join("")
				.trimEnd(),
		);
		while (rows.at(-1) === "") rows.pop();
		return rows;
	}

	/** Place of the cursor: its row in `text`, and its column. */
	get cursor(): { readonly row: number; readonly column: number } {
		return { row: this.#row, column: this.#column };
	}

	write(text: string): void {
		this.written += text;
		const [plain, ...parts] = (this.#unended + text).split("\u001b");
		this.#unended = "";
		for (const character of plain!) this.#put(character);
		for (const [i, part] of parts.entries()) {
			const sequence = /^\[[\d;]*[A-Za-z]/.exec(part)?.[0];
			if (sequence === undefined) {
				if (i < parts.length - 1) throw new Error(`The screen does not know the sequence ${part}.`);
				this.#unended = `\u001b${part}`;
				return;
			}
			this.#control(sequence.slice(1));
			for (const character of part.slice(sequence.length)) this.#put(character);
		}
	}

	#control(sequence: string): void {
		const count = Number.parseInt(sequence, 10) || 1;
		const kind = sequence.at(-1);
		const top = Math.max(0, this.#lines.length - this.rows);
		if (kind === "A") this.#row = Math.max(top, this.#row - count);
		else if (kind === "K" || kind === "J") {
			this.#lines[this.#row]!.length = Math.min(this.#lines[this.#row]!.length, this.#column);
			if (kind === "J") for (const line of this.#lines.slice(this.#row + 1)) line.length = 0;
		} else if (kind !== "m") throw new Error(`The screen does not know the sequence ${sequence}.`);
	}

	#put(character: string): void {
		if (character === "\r") this.#column = 0;
		else if (character === "\n") this.#nextLine();
		else {
			if (this.#column === this.columns) this.#nextLine();
			this.#lines[this.#row]![this.#column++] = character;
		}
	}

	#nextLine(): void {
		this.#column = 0;
		if (++this.#row === this.#lines.length) this.#lines.push([]);
	}
}
