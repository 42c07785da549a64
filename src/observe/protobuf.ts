/** Writes and reads protocol buffer messages field by field, without their definitions. */
import protobuf from "protobufjs/minimal.js";
import { UserError } from "../system/errors.ts";

const { Reader, Writer } = protobuf;

/** Types of fields on the wire. */
const Wire = { varint: 0, double: 1, bytes: 2, float: 5 } as const;

/** Writes a protocol buffer message. Integers must be at least 0. */
export class Message {
	readonly #writer = Writer.create();

	varint(field: number, value: number): this {
		this.#key(field, Wire.varint).uint64(value);
		return this;
	}

	double(field: number, value: number): this {
		this.#key(field, Wire.double).double(value);
		return this;
	}

	float(field: number, value: number): this {
		this.#key(field, Wire.float).float(value);
		return this;
	}

	doubles(field: number, values: readonly number[]): this {
		this.#key(field, Wire.bytes).bytes(new Uint8Array(Float64Array.from(values).buffer));
		return this;
	}

	text(field: number, value: string): this {
		this.#key(field, Wire.bytes).string(value);
		return this;
	}

	message(field: number, value: Message): this {
		this.#key(field, Wire.bytes).bytes(value.encoded());
		return this;
	}

	/** The bytes of all fields added so far. */
	encoded(): Uint8Array {
		return this.#writer.finish();
	}

	#key(field: number, type: number): protobuf.Writer {
		return this.#writer.uint32(field * 8 + type);
	}
}

export interface Field {
	readonly number: number;
	readonly value: number;
	readonly bytes: Uint8Array;
}

/**
 * Fields of a protocol buffer message: varints and floats as `value`, length-delimited ones as `bytes`. Throws a UserError
 * that names `path` if a field is damaged.
 */
export function* fields(message: Uint8Array, path: string): Generator<Field> {
	const reader = Reader.create(message);
	const none = new Uint8Array(0);
	const next = (): Field => {
		const key = reader.tag();
		const number = key >>> 3;
		switch (key & 7) {
			case Wire.varint:
				return { number, value: Number(reader.uint64()), bytes: none };
			case Wire.double:
				return { number, value: reader.double(), bytes: none };
			case Wire.bytes:
				return { number, value: Number.NaN, bytes: reader.bytes() };
			case Wire.float:
				return { number, value: reader.float(), bytes: none };
			default:
				throw new RangeError(`a field is of wire type ${key & 7}`);
		}
	};
	while (reader.pos < reader.len) {
		let field: Field;
		try {
			field = next();
		} catch (error) {
			throw new UserError(`${path} is damaged: ${(error as Error).message}.`);
		}
		yield field;
	}
}
