/**
 * The task encoders of the reference data (their README lists them): each exercises one feature of the loader. Images
 * are left encoded unless a decoder is given; that never changes an order.
 */

import { SkipSample } from "../../../src/data/energon/errors.ts";
import type { DecodeOptions } from "../../../src/data/energon/format/media.ts";
import { hook } from "../../../src/data/energon/hook.ts";
import type { TaskEncoder } from "../../../src/data/energon/task-encoder.ts";
import { UserError } from "../../../src/system/errors.ts";
import { byteLength, collect, cooker, type Element, elementOf, encoded, packing } from "./elements.ts";
import { furtherTask } from "./further-tasks.ts";

const preencodeSample = hook("encode_sample", encoded);

/**
 * Task encoders of the reference data of which no part is built here: several outputs of a function, draws, groups of batches, and
 * encoding after the selection of samples to pack. No task of the program has one.
 */
export const notBuilt: readonly string[] = [
	"Generating",
	"Grouping",
	"GroupingSizes",
	"PackingPost",
	"PreAndEncode",
	"Seeded",
	"Unseeded",
];

/** Task encoder `name` of the reference data; `args` are its constructor's. */
export function goldenTask(
	name: string,
	decode: DecodeOptions,
	args: Readonly<Record<string, unknown>> = {},
): TaskEncoder {
	const plain: TaskEncoder = {
		decode,
		cookers: [cooker(null)],
		batch: hook("batch", collect("batch")),
	};
	const encode: TaskEncoder = { ...plain, preencodeSample };
	switch (name) {
		case "Plain":
			return plain;
		case "Encode":
			return encode;
		case "EncodeBatch":
		case "Stock":
			return { ...encode, cookers: name === "Stock" ? [] : plain.cookers, encodeBatch: hook("encode_batch", (b) => b) };
		case "Tagged":
			return {
				...encode,
				cookers: [cooker("vqa-cooker", { kind: "vqa" }), cooker("text-cooker", { kind: "text" }), cooker("any-cooker")],
			};
		case "Skipping":
			return {
				...plain,
				preencodeSample: hook("encode_sample", (sample) => {
					const element = elementOf(sample);
					if (byteLength(element) % 5 === 2) throw new SkipSample();
					return element;
				}),
			};
		case "Failing":
			return {
				...plain,
				preencodeSample: hook("encode_sample", (sample) => {
					const element = elementOf(sample);
					if (byteLength(element) % 7 === 3) throw new Error("length mod 7 is 3");
					return element;
				}),
			};
		case "Packing":
			return { ...encode, ...packing(args) };
		default:
			return furtherTask(name, encode, args) ?? brokenTask(name, encode, decode);
	}
}

/** Task encoders with mistakes, used by the corrupt data. */
function brokenTask(name: string, encode: TaskEncoder, decode: DecodeOptions): TaskEncoder {
	const nothingWorks = (): Element => {
		throw new Error("nothing works");
	};
	switch (name) {
		case "Oversized":
			return {
				...encode,
				selectSamplesToPack: hook("select_samples_to_pack", (items) => {
					if (items.map(elementOf).some(({ keys }) => keys[0]! < "009")) throw new Error("sample too long");
					return [items];
				}),
				packSelectedSamples: hook("pack_selected_samples", collect("pack")),
			};
		case "PacksNothing":
			return {
				...encode,
				selectSamplesToPack: hook("select_samples_to_pack", () => []),
				packSelectedSamples: hook("pack_selected_samples", collect("pack")),
			};
		case "ThrowsSystem":
			return {
				...encode,
				preencodeSample: hook("encode_sample", (): Element => {
					throw new ReferenceError("undefined_name is not defined");
				}),
			};
		case "ThrowsKey":
			return { ...encode, preencodeSample: hook("encode_sample", nothingWorks) };
		case "Tolerance3":
			return { ...encode, preencodeSample: hook("encode_sample", nothingWorks, { tolerance: 3 }) };
		case "Tolerance3Seeds":
			// Energon forgets a tolerance that is given together with restored seeds.
			return { ...encode, preencodeSample: hook("encode_sample", nothingWorks) };
		case "StatefulEncode":
			return { ...encode, preencodeSample: hook("encode_sample", encoded, { stateless: false }) };
		case "NoCookers":
			return { ...encode, cookers: [] };
		case "TwoCookersNoMatch":
			return { ...encode, cookers: [cooker("a", { kind: "a" }), cooker("b", { kind: "b" })] };
		case "StatefulCooker":
			return { ...encode, decode, cookers: [cooker(null, {}, false)] };
		default:
			throw new UserError(`The reference data use the task encoder ${name}, which is not known here.`);
	}
}
