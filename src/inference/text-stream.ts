/** Decodes tokens to text as they arrive; a character of several tokens is written when complete. */

/** The replacement character, which decoders write for bytes that are no character yet. */
const incomplete = "\ufffd";

export class TextStream {
	readonly #ids: number[] = [];
	/** Tokens from here on are decoded: some before the new ones, because spaces depend on what is before. */
	#from = 0;
	/** Tokens before this one are written. */
	#written = 0;

	constructor(
		private readonly decode: (ids: readonly number[]) => string,
		private readonly write: (text: string) => void,
	) {}

	add(id: number): void {
		this.#ids.push(id);
		this.#flush(false);
	}

	/** Writes what is left, complete or not. */
	end(): void {
		this.#flush(true);
	}

	#flush(all: boolean): void {
		const before = this.decode(this.#ids.slice(this.#from, this.#written));
		const text = this.decode(this.#ids.slice(this.#from));
		if (text.length <= before.length || (!all && text.endsWith(incomplete))) return;
		this.write(text.slice(before.length));
		this.#from = this.#written;
		this.#written = this.#ids.length;
	}
}
