/** Writes and reads protocol buffer messages field by field, without their definitions. */
import { UserError } from "../system/errors.ts";

const encoder = new TextEncoder();

/** Writes a protocol buffer message. Integers must be at least 0. */
export class Message {
	#bytes = new Uint8Array(64);
	#view = new DataView(this.#bytes.buffer);
	#length = 0;

	varint(field: number, value: number): this {
		this.#key(field, 0);
		this.#varint(value);
		return this;
	}

	double(field: number, value: number): this {
		this.#key(field, 1);
		const at = this.#take(8);
		this.#view.setFloat64(at, value, true);
		return this;
	}

	float(field: number, value: number): this {
		this.#key(field, 5);
		const at = this.#take(4);
		this.#view.setFloat32(at, value, true);
		return this;
	}

	doubles(field: number, values: readonly number[]): this {
		return this.bytes(field, new Uint8Array(Float64Array.from(values).buffer));
	}

	text(field: number, value: string): this {
		return this.bytes(field, encoder.encode(value));
	}

	message(field: number, value: Message): this {
		return this.bytes(field, value.encoded());
	}

	/** The bytes of all fields added so far; valid until more is added. */
	encoded(): Uint8Array {
		return this.#bytes.subarray(0, this.#length);
	}

	bytes(field: number, value: Uint8Array): this {
		this.#key(field, 2);
		this.#varint(value.length);
		const at = this.#take(value.length);
		this.#bytes.set(value, at);
		return this;
	}

	#key(field: number, type: number): void {
		this.#varint(field * 8 + type);
	}

	#varint(value: number): void {
		let rest = value;
		while (rest >= 128) {
			this.#byte((rest % 128) + 128);
			rest = Math.floor(rest / 128);
		}
		this.#byte(rest);
	}

	#byte(value: number): void {
		const at = this.#take(1);
		this.#bytes[at] = value;
	}

	/** Offset of the next `count` bytes; the buffer may be reallocated. */
	#take(count: number): number {
		const at = this.#length;
		this.#length += count;
		if (this.#length > this.#bytes.length) {
			const larger = new Uint8Array(2 * this.#length);
			larger.set(this.#bytes.subarray(0, at));
			this.#bytes = larger;
			this.#view = new DataView(larger.buffer);
		}
		return at;
	}
}

export interface Field {
	readonly number: number;
	readonly value: number;
	readonly bytes: Uint8Array;
}

/**
 * Fields of a protocol buffer message: varints and floats as `value`, length-delimited ones as `bytes`. Throws a UserError
 * that names `path` if a field is truncated.
 */
export function* fields(message: Uint8Array, path: string): Generator<Field> {
	const view = new DataView(message.buffer, message.byteOffset, message.byteLength);
	const none = new Uint8Array(0);
	let at = 0;
	const take = (length: number): number => {
		if (length > message.length - at) throw new UserError(`${path} is damaged: a field is longer than its message.`);
		at += length;
		return at - length;
	};
	const varint = () => {
		let value = 0;
		for (let scale = 1; ; scale *= 128) {
			const byte = message[take(1)]!;
			value += (byte & 127) * scale;
			if (byte < 128) return value;
		}
	};
	while (at < message.length) {
		const key = varint();
		const number = Math.floor(key / 8);
		switch (key % 8) {
			case 0:
				yield { number, value: varint(), bytes: none };
				break;
			case 1:
				yield { number, value: view.getFloat64(take(8), true), bytes: none };
				break;
			case 2: {
				const length = varint();
				const begin = take(length);
				yield { number, value: Number.NaN, bytes: message.subarray(begin, at) };
				break;
			}
			case 5:
				yield { number, value: view.getFloat32(take(4), true), bytes: none };
				break;
			default:
				return;
		}
	}
}
