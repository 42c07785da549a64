/** Tokens to train on: text files through a tokenizer, or ready-made rows in a safetensors file. */
import { isUtf8 } from "node:buffer";
import { existsSync, statSync } from "node:fs";
import { fileKind } from "../../config/file-kind.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { readWholeFile } from "../../system/input-file.ts";
import { watched } from "../../system/read-watch.ts";
import { importLine } from "../import/detect.ts";
import type { Tokenizer } from "./tokenizer.ts";

/** Samples by number, each S + 1 tokens. The same number gives the same sample on every rank and in every run. */
export interface TokenSource {
	/** Samples of one epoch. */
	readonly samples: number;
	readonly sequenceLength: number;
	/** Sample `index` of the endless stream (epochs one after the other). */
	sample(index: number): Int32Array;
}

/** Bytes of the largest text file: it is read whole, and its tokens take four times as much or less. */
const LARGEST_FILE = 2 ** 30;

/** Throws a UserError for a file that cannot be text to train on: missing, too large, or of another known format. */
export function checkTextFile(path: string): void {
	watched(path, () => requireText(path));
}

function requireText(path: string): void {
	if (!existsSync(path)) throw new UserError(`The data file ${path} does not exist.`);
	const stat = statSync(path);
	if (!stat.isFile()) throw new UserError(`The data file ${path} is not a file.`);
	if (stat.size > LARGEST_FILE) {
		throw new UserError(`The data file ${path} has ${stat.size} bytes; text is read whole, at most ${LARGEST_FILE}.`);
	}
	const kind = fileKind(path);
	if (kind !== null && !kind.isText) {
		const line = importLine(path);
		const fix = line === null ? "" : `: ${line} makes a data set of it, for --dataset-provider energon`;
		throw new UserError(`The data file ${path} is ${kind.name}, not text${fix}.`);
	}
}

/** Reads a text file into tokens. */
export function readTokens(path: string, tokenizer: Tokenizer): Int32Array {
	checkTextFile(path);
	const bytes = readWholeFile(path, LARGEST_FILE, { called: `the data file ${path}` });
	if (!isUtf8(bytes))
		throw new UserError(`The data file ${path} is not text in UTF-8: convert it, for example with iconv.`);
	const tokens = tokenizer.encode(bytes);
	if (tokens.length === 0) throw new UserError(`The data file ${path} holds no tokens.`);
	return tokens;
}

/** Cuts a token stream into windows of S + 1 tokens that overlap by one, shuffled anew every epoch. */
export function windowedSource(
	tokens: Int32Array,
	sequenceLength: number,
	shuffleSeed: number | null,
	name: string,
): TokenSource {
	const samples = Math.floor((tokens.length - 1) / sequenceLength);
	if (samples < 1) {
		throw new UserError(
			`${name} has ${counted(tokens.length, "token")}, fewer than one sample of sequence-length ${sequenceLength} + 1 needs.`,
		);
	}
	let shuffled: { epoch: number; order: Uint32Array } | null = null;
	return {
		samples,
		sequenceLength,
		sample(index) {
			const epoch = Math.floor(index / samples);
			let window = index % samples;
			if (shuffleSeed !== null) {
				if (shuffled?.epoch !== epoch) shuffled = { epoch, order: permutation(samples, shuffleSeed, epoch) };
				window = shuffled.order[window]!;
			}
			return tokens.subarray(window * sequenceLength, window * sequenceLength + sequenceLength + 1);
		},
	};
}

/** Rows of a [samples, S + 1] matrix, in order. */
export function rowSource(rows: Int32Array, sequenceLength: number): TokenSource {
	const width = sequenceLength + 1;
	const samples = rows.length / width;
	return {
		samples,
		sequenceLength,
		sample: (index) => rows.subarray((index % samples) * width, ((index % samples) + 1) * width),
	};
}

/** Fisher-Yates with SplitMix64 keyed by (seed, epoch). */
function permutation(count: number, seed: number, epoch: number): Uint32Array {
	let state = BigInt.asUintN(64, (BigInt(seed) << 32n) ^ BigInt(epoch));
	const next = () => {
		state = BigInt.asUintN(64, state + 0x9e3779b97f4a7c15n);
		let z = state;
		z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
		z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
		return Number((z ^ (z >> 31n)) >> 11n) / 2 ** 53;
	};
	const order = Uint32Array.from({ length: count }, (_, i) => i);
	for (let i = count - 1; i > 0; i--) {
		const j = Math.floor(next() * (i + 1));
		[order[i], order[j]] = [order[j]!, order[i]!];
	}
	return order;
}
