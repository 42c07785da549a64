/** The stack of the pickle machine, its marks, and the memo of values. */

export interface StackLimits {
	readonly stack: number;
	readonly marks: number;
	readonly memo: number;
}

/** Numbers that a memo index may skip: old picklers begin at 1. */
const LARGEST_MEMO_GAP = 16;

const hole = Symbol("memo hole");

export class PickleStack {
	readonly #values: unknown[] = [];
	/** Number of values below each mark. */
	readonly #marks: number[] = [];
	readonly #memo: unknown[] = [];

	constructor(
		private readonly limits: StackLimits,
		/** Throws an error with the reason. */
		private readonly refuse: (reason: string) => never,
	) {}

	/** Whether the stack has neither values nor marks. */
	get empty(): boolean {
		return this.#values.length === 0 && this.#marks.length === 0;
	}

	push(value: unknown): void {
		if (this.#values.length >= this.limits.stack) this.refuse("its stack grows without bound");
		this.#values.push(value);
	}

	/** The newest value above the newest mark. */
	top(): unknown {
		if (this.#values.length <= this.#floor) this.refuse("its stack is empty");
		return this.#values.at(-1);
	}

	pop(): unknown {
		this.top();
		return this.#values.pop();
	}

	/** The newest `count` values, oldest first. */
	popCount(count: number): unknown[] {
		if (this.#values.length - count < this.#floor) this.refuse("its stack is empty");
		return this.#values.splice(this.#values.length - count);
	}

	mark(): void {
		if (this.#marks.length >= this.limits.marks) this.refuse("it is nested too deeply");
		this.#marks.push(this.#values.length);
	}

	/** Removes the newest mark; returns the values above it, oldest first. */
	popMark(): unknown[] {
		const mark = this.#marks.pop();
		if (mark === undefined) return this.refuse("a mark is missing");
		return this.#values.splice(mark);
	}

	/** Removes the newest mark or value, whichever is newer. */
	drop(): void {
		if (this.#marks.at(-1) === this.#values.length) this.#marks.pop();
		else this.pop();
	}

	/** Stores the newest value under a memo number, by default the next free number. */
	remember(index = this.#memo.length): void {
		const memo = this.#memo;
		if (index >= this.limits.memo || index > memo.length + LARGEST_MEMO_GAP) {
			this.refuse(`memo number ${index} is out of order`);
		}
		while (memo.length < index) memo.push(hole);
		memo[index] = this.top();
	}

	/** Pushes the value of a memo number. */
	recall(index: number): void {
		const value = index < this.#memo.length ? this.#memo[index] : hole;
		if (value === hole) this.refuse(`memo number ${index} was never set`);
		this.push(value);
	}

	get #floor(): number {
		return this.#marks.at(-1) ?? 0;
	}
}
