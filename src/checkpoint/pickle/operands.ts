/** Operands of the pickle machine: the bytes that it reads, and its stack with marks and memo. */
import { UserError } from "../../system/errors.ts";

/** Bytes of the longest integer that is accepted. */
const LONGEST_INTEGER = 1024;

/** Reads the bytes of a pickle from front to back; every length is checked before memory is allocated. */
export class Cursor {
	position = 0;
	readonly #view: DataView;
	readonly #decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

	constructor(
		readonly bytes: Uint8Array,
		/** File or item; every error begins with it. */
		readonly where: string,
		/** Bytes of the longest string that is accepted. */
		readonly longestText: number,
	) {
		this.#view = new DataView(bytes.buffer as ArrayBuffer, bytes.byteOffset, bytes.byteLength);
	}

	refuse(reason: string): never {
		throw new UserError(`${this.where}: the pickle is refused at byte ${this.position}, ${reason}.`);
	}

	u16(): number {
		return this.#view.getUint16(this.advance(2), true);
	}

	i32(): number {
		return this.#view.getInt32(this.advance(4), true);
	}

	/** A big-endian double; all other numbers of a pickle are little-endian. */
	f64(): number {
		return this.#view.getFloat64(this.advance(8), false);
	}

	/** Advances by `count` bytes and returns the position of the first. */
	advance(count: number): number {
		const begin = this.position;
		if (count > this.bytes.byteLength - begin) this.refuse("it is truncated");
		this.position += count;
		return begin;
	}

	byte(): number {
		return this.bytes[this.advance(1)]!;
	}

	u32(): number {
		return this.#view.getUint32(this.advance(4), true);
	}

	u64(): number {
		const value = this.#view.getBigUint64(this.advance(8), true);
		if (value > BigInt(this.bytes.byteLength)) this.refuse("it is truncated");
		return Number(value);
	}

	/** Checks that `count` bytes follow without reading them. */
	length(count: number): void {
		if (count > this.bytes.byteLength - this.position) this.refuse("it is truncated");
	}

	data(count: number): Uint8Array {
		const begin = this.advance(count);
		return this.bytes.slice(begin, begin + count);
	}

	text(count: number): string {
		if (count > this.longestText) this.refuse(`a text has ${count} bytes`);
		const begin = this.advance(count);
		try {
			return this.#decoder.decode(this.bytes.subarray(begin, begin + count));
		} catch {
			return this.refuse("a text is not UTF-8");
		}
	}

	/** Python 2's str, decoded as Latin-1. */
	latin(count: number): string {
		if (count > this.longestText) this.refuse(`a text has ${count} bytes`);
		const begin = this.advance(count);
		return Buffer.from(this.bytes.subarray(begin, begin + count)).toString("latin1");
	}

	line(): string {
		const end = this.bytes.indexOf(0x0a, this.position);
		if (end < 0) return this.refuse("it is truncated");
		const text = this.text(end - this.position);
		this.advance(1);
		return text;
	}

	/** An integer of `count` bytes in little-endian two's complement. */
	integer(count: number): number | bigint {
		if (count > LONGEST_INTEGER) this.refuse(`an integer has ${count} bytes`);
		const begin = this.advance(count);
		const digits = Buffer.from(this.bytes.subarray(begin, begin + count))
			.reverse()
			.toString("hex");
		let value = BigInt(`0x${digits || "0"}`);
		if (count > 0 && this.bytes[begin + count - 1]! >= 0x80) value -= 1n << BigInt(8 * count);
		const small = Number(value);
		return Number.isSafeInteger(small) ? small : value;
	}
}

export interface StackLimits {
	readonly stack: number;
	readonly marks: number;
	readonly memo: number;
}

/** Numbers that a memo index may skip: old picklers begin at 1. */
const LARGEST_MEMO_GAP = 16;

const hole = Symbol("memo hole");

/** The stack of the pickle machine, its marks, and the memo of values. */
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
