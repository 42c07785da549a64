/** Reads a .wandb file on its own terms: LevelDB's log format, then protocol buffers without a schema. */
import { crc32 } from "node:zlib";

/** Field number → its values: numbers of varints and doubles, bytes of everything with a length. */
export type Fields = Map<number, (number | Uint8Array)[]>;

/** All records of a file; throws at the first malformed byte. `torn`: bytes behind the last whole record. */
export function decodeLog(file: Buffer): {
	readonly records: Fields[];
	readonly raw: Buffer[];
	readonly torn: number;
} {
	if (file.toString("latin1", 0, 4) !== ":W&B" || file.readUInt16LE(4) !== 0xbee1 || file[6] !== 0) {
		throw new Error("no W&B log");
	}
	const raw: Buffer[] = [];
	let at = 7;
	let whole = 7;
	let parts: Buffer[] = [];
	while (at < file.length) {
		const left = 32768 - (at % 32768);
		if (left < 7) {
			if (file.subarray(at, at + left).some((byte) => byte !== 0)) throw new Error(`padding at ${at}`);
			at += left;
			continue;
		}
		if (at + 7 > file.length) break;
		const length = file.readUInt16LE(at + 4);
		if (7 + length > left) throw new Error(`the piece at ${at} crosses a block`);
		if (at + 7 + length > file.length) break;
		const kind = file[at + 6]!;
		if (crc32(file.subarray(at + 6, at + 7 + length)) !== file.readUInt32LE(at)) throw new Error(`checksum at ${at}`);
		const expected = parts.length === 0 ? [1, 2] : [3, 4];
		if (!expected.includes(kind)) throw new Error(`a piece of kind ${kind} at ${at}`);
		parts.push(file.subarray(at + 7, at + 7 + length));
		at += 7 + length;
		if (kind === 2 || kind === 3) continue;
		raw.push(Buffer.concat(parts));
		parts = [];
		whole = at;
	}
	return { records: raw.map(decodeMessage), raw, torn: file.length - whole };
}

export function decodeMessage(bytes: Uint8Array): Fields {
	const message: Fields = new Map();
	let at = 0;
	const varint = () => {
		let value = 0n;
		for (let shift = 0n; ; shift += 7n) {
			const byte = bytes[at++];
			if (byte === undefined) throw new Error("a number is cut");
			value |= BigInt(byte & 127) << shift;
			if (byte < 128) return Number(value);
		}
	};
	while (at < bytes.length) {
		const key = varint();
		const field = key >> 3;
		let value: number | Uint8Array;
		if ((key & 7) === 0) value = varint();
		else if ((key & 7) === 2) {
			const length = varint();
			if (at + length > bytes.length) throw new Error("a field is cut");
			value = bytes.subarray(at, at + length);
			at += length;
		} else throw new Error(`wire type ${key & 7}`);
		message.set(field, [...(message.get(field) ?? []), value]);
	}
	return message;
}

export const messagesOf = (message: Fields, field: number): Fields[] =>
	(message.get(field) ?? []).map((value) => decodeMessage(value as Uint8Array));

export const textOf = (message: Fields, field: number): string =>
	Buffer.from((message.get(field)?.[0] as Uint8Array | undefined) ?? []).toString();

export const numberOf = (message: Fields, field: number): number => (message.get(field)?.[0] as number) ?? 0;

/** nested_key = 2, value_json = 16 of the items in `field`. */
export function itemsOf(message: Fields, field: number): Record<string, unknown> {
	const number = (text: string) => (/^-?(NaN|Infinity)$/.test(text) ? Number(text) : JSON.parse(text));
	return Object.fromEntries(messagesOf(message, field).map((item) => [textOf(item, 2), number(textOf(item, 16))]));
}

/** Kinds by their field in Record, with the record's number. */
export function kindsOf(records: readonly Fields[]): string[] {
	const names: Readonly<Record<number, string>> = {
		2: "history",
		3: "summary",
		5: "config",
		6: "files",
		13: "output",
		17: "run",
		18: "exit",
		21: "header",
		23: "preempting",
		26: "environment",
	};
	return records.map((record) => {
		const kinds = [...record.keys()].flatMap((field) => names[field] ?? (field === 1 ? [] : [`field ${field}`]));
		return `${numberOf(record, 1)} ${kinds.join("+")}`;
	});
}
