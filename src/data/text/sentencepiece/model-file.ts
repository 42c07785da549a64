/** A SentencePiece .model: the protocol buffer ModelProto of sentencepiece_model.proto, as far as encoding and decoding read it. */
import { type Field, fields } from "../../../observe/protobuf.ts";
import { UserError } from "../../../system/errors.ts";

/** Numbers of ModelProto.SentencePiece.Type. */
const pieceTypes = { 1: "normal", 2: "unknown", 3: "control", 4: "user", 5: "unused", 6: "byte" } as const;
/** Numbers of TrainerSpec.ModelType. */
const modelTypes = { 1: "unigram", 2: "bpe", 3: "word", 4: "char" } as const;

type PieceType = (typeof pieceTypes)[keyof typeof pieceTypes];

export interface SentencePiece {
	readonly text: string;
	/** fp32. */
	readonly score: number;
	readonly type: PieceType;
}

/** How text is normalized before it is cut into pieces. */
export interface Normalization {
	/** Rules of replacement: a double array with the texts behind it; empty: none. */
	readonly charsMap: Uint8Array;
	readonly addDummyPrefix: boolean;
	readonly removeExtraWhitespaces: boolean;
	readonly escapeWhitespaces: boolean;
	/** The dummy prefix goes to the end. */
	readonly whitespaceAsSuffix: boolean;
}

export interface ModelFile {
	readonly pieces: readonly SentencePiece[];
	readonly type: (typeof modelTypes)[keyof typeof modelTypes];
	readonly byteFallback: boolean;
	readonly normalization: Normalization;
	/** Text of a token that is decoded for the unknown. */
	readonly unknownSurface: string;
	/** Piece that ends a text. */
	readonly endPiece: string;
}

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Throws a UserError for bytes that are no such model. */
export function parseModelFile(bytes: Uint8Array, path: string): ModelFile {
	const refuse = (what: string) => new UserError(`${path} is not a SentencePiece model: ${what}.`);
	const text = (field: Field) => {
		try {
			return utf8.decode(field.bytes);
		} catch {
			throw refuse(`field ${field.number} is not text in UTF-8`);
		}
	};
	const pieceOf = (message: Uint8Array): SentencePiece => {
		const piece = { text: "", score: 0, type: "normal" as PieceType };
		for (const field of fields(message, path)) {
			if (field.number === 1) piece.text = text(field);
			else if (field.number === 2) piece.score = field.value;
			else if (field.number === 3) {
				const type = pieceTypes[field.value as keyof typeof pieceTypes];
				if (type === undefined) throw refuse(`a piece is of type ${field.value}`);
				piece.type = type;
			}
		}
		if (piece.text === "" || !Number.isFinite(piece.score)) throw refuse("a piece has no text or no score");
		return piece;
	};
	const pieces: SentencePiece[] = [];
	const trainer = { type: "unigram" as ModelFile["type"], byteFallback: false, suffix: false };
	const surfaces = { unknown: " \u2047 ", end: "</s>" };
	const rules = { charsMap: new Uint8Array(0), prefix: true, remove: true, escape: true };
	for (const { number, bytes: message } of fields(bytes, path)) {
		if (number === 1) pieces.push(pieceOf(message));
		else if (number === 2) {
			for (const field of fields(message, path)) {
				if (field.number === 3) {
					const type = modelTypes[field.value as keyof typeof modelTypes];
					if (type === undefined) throw refuse(`its type is ${field.value}`);
					trainer.type = type;
				} else if (field.number === 24) trainer.suffix = field.value !== 0;
				else if (field.number === 35) trainer.byteFallback = field.value !== 0;
				else if (field.number === 44) surfaces.unknown = text(field);
				else if (field.number === 47) surfaces.end = text(field);
			}
		} else if (number === 3) {
			for (const field of fields(message, path)) {
				if (field.number === 2) rules.charsMap = new Uint8Array(field.bytes);
				else if (field.number === 3) rules.prefix = field.value !== 0;
				else if (field.number === 4) rules.remove = field.value !== 0;
				else if (field.number === 5) rules.escape = field.value !== 0;
			}
		}
	}
	if (pieces.length === 0) throw refuse("it has no pieces");
	const unknown = pieces.filter(({ type }) => type === "unknown").length;
	if (unknown !== 1) throw refuse(`it has ${unknown} pieces of type unknown, and needs one`);
	return {
		pieces,
		type: trainer.type,
		byteFallback: trainer.byteFallback,
		normalization: {
			charsMap: rules.charsMap,
			addDummyPrefix: rules.prefix,
			removeExtraWhitespaces: rules.remove,
			escapeWhitespaces: rules.escape,
			whitespaceAsSuffix: trainer.suffix,
		},
		unknownSurface: surfaces.unknown,
		endPiece: surfaces.end,
	};
}
