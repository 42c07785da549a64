/**
 * The task encoders of the reference data (their README lists them): each exercises one feature of the loader. Images
 * are left encoded unless a decoder is given; that never changes an order.
 */

import { SkipSample } from "../../data/energon/errors.ts";
import type { DecodeOptions } from "../../data/energon/format/decode.ts";
import { generatorHook, type HookContext, hook } from "../../data/energon/hook.ts";
import type { Keyed, RestoreKey, Sample, SourceInfo } from "../../data/energon/sample.ts";
import type { Cooker, TaskEncoder } from "../../data/energon/task-encoder.ts";
import { UserError } from "../../native/errors.ts";

/** An encoded sample, a pack or a batch of the reference data. */
export interface Element extends Keyed {
	restoreKey: RestoreKey;
	readonly kind: "sample" | "pack" | "batch";
	readonly keys: readonly string[];
	readonly sources: readonly SourceInfo[];
	readonly texts: readonly string[];
	/** What the encoder adds: name of the cooker, number of a copy, draws, lengths. */
	readonly extra: unknown;
}

interface CookedText {
	readonly text: string;
	readonly cooker: string | null;
}

/** Text of any sample: its caption, the first turn of a conversation, or the field `text`. */
function textOf(fields: Readonly<Record<string, unknown>>): string {
	if (typeof fields.caption === "string") return fields.caption;
	const json = (fields.json ?? {}) as { conversations?: { value: string }[]; text?: string };
	return json.conversations?.[0]?.value ?? json.text ?? String((fields as { text?: string }).text ?? "");
}

/** Any output of a pipeline as an element. */
export function elementOf(item: Keyed): Element {
	if ("kind" in item) return item as Element;
	const { key, sources, fields, restoreKey } = item as Sample;
	const cooked = fields.cooked as CookedText | undefined;
	return {
		restoreKey,
		kind: "sample",
		keys: [key],
		sources,
		texts: [cooked?.text ?? textOf(fields)],
		extra: cooked?.cooker ?? undefined,
	};
}

const byteLength = (element: Element) => Buffer.byteLength(element.texts[0]!);

function cooker(name: string | null, hasSubflavors: Readonly<Record<string, unknown>> = {}, stateless = true): Cooker {
	const cook = hook<Sample, Sample>(
		"cook_crude_sample",
		(sample) => {
			if (!stateless) throw new Error("the cooker must be stateless");
			return { ...sample, type: "Cooked", fields: { cooked: { text: textOf(sample.fields), cooker: name } } };
		},
		{ stateless: true },
	);
	return { cook, hasSubflavors };
}

function collect(kind: "batch" | "pack") {
	return (items: readonly Keyed[]): Element => {
		const elements = items.map(elementOf);
		return {
			restoreKey: [],
			kind,
			keys: elements.flatMap(({ keys }) => keys),
			sources: elements.flatMap(({ sources }) => sources),
			texts: elements.flatMap(({ texts }) => texts),
			extra:
				kind === "pack"
					? elements.map(byteLength)
					: elements.every((element) => element.kind === "pack")
						? elements.map(({ extra }) => extra)
						: undefined,
		};
	};
}

const encoded = (sample: Sample): Element => elementOf(sample);

/** torch.rand(1), numpy.random.random_sample(), random.random(), then the two call numbers. */
function draws({ random, sampleIndex, batchIndex }: HookContext): unknown[] {
	return [random.torch.unit(), random.numpy.randomSample(), random.python.random(), sampleIndex, batchIndex];
}

function nextFit(items: readonly Element[], capacity: number): Element[][] {
	const groups: Element[][] = [];
	let open: Element[] = [];
	let used = 0;
	for (const item of items) {
		const length = byteLength(item);
		if (open.length > 0 && used + length > capacity) {
			groups.push(open);
			open = [];
			used = 0;
		}
		open.push(item);
		used += length;
	}
	if (open.length > 0) groups.push(open);
	return groups;
}

function firstFitDecreasing(items: readonly Element[], capacity: number): Element[][] {
	const groups: { items: Element[]; used: number }[] = [];
	for (const item of [...items].sort((a, b) => byteLength(b) - byteLength(a))) {
		const length = byteLength(item);
		const group = groups.find(({ used }) => used + length <= capacity);
		if (group) {
			group.items.push(item);
			group.used += length;
		} else {
			groups.push({ items: [item], used: length });
		}
	}
	return groups.map(({ items: members }) => members);
}

function packing({ capacity, packer }: { capacity?: number; packer?: string }): Partial<TaskEncoder> {
	const limit = capacity ?? 0;
	if (packer !== "next_fit" && packer !== "first_fit_decreasing") throw new UserError(`There is no packer ${packer}.`);
	const divide = packer === "next_fit" ? nextFit : firstFitDecreasing;
	return {
		selectSamplesToPack: hook("select_samples_to_pack", (items) => divide(items.map(elementOf), limit), {
			stateless: false,
		}),
		packSelectedSamples: hook("pack_selected_samples", collect("pack")),
	};
}

const encodeSample = hook("encode_sample", encoded);

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
	const encode: TaskEncoder = { ...plain, encodeSample };
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
				encodeSample: hook("encode_sample", (sample) => {
					const element = elementOf(sample);
					if (byteLength(element) % 5 === 2) throw new SkipSample();
					return element;
				}),
			};
		case "Failing":
			return {
				...plain,
				encodeSample: hook("encode_sample", (sample) => {
					const element = elementOf(sample);
					if (byteLength(element) % 7 === 3) throw new Error("length mod 7 is 3");
					return element;
				}),
			};
		case "Generating":
			return {
				...plain,
				encodeSample: generatorHook("encode_sample", function* (sample: Sample) {
					const element = elementOf(sample);
					const copies = byteLength(element) % 4;
					for (let i = 0; i < copies; i++) {
						yield { ...element, restoreKey: sample.restoreKey, texts: [String(i)], extra: i };
					}
				}),
			};
		case "Seeded":
		case "Unseeded":
			return {
				...plain,
				encodeSample: hook("encode_sample", (sample, context) => ({ ...elementOf(sample), extra: draws(context) }), {
					restoreSeeds: name === "Seeded",
				}),
			};
		case "Packing":
			return { ...encode, ...packing(args) };
		case "PackingPost": {
			const { encodeSample: _, ...rest } = encode;
			return {
				...rest,
				preencodeSample: hook("preencode_sample", encoded),
				postencodeSample: hook("postencode_sample", (item: Keyed) => item),
				...packing(args),
			};
		}
		case "Grouping":
			return {
				...encode,
				batchGroupCriterion: hook("batch_group_criterion", (item: Keyed) => ({
					key: String(Math.floor(byteLength(elementOf(item)) / 30)),
					batchSize: null,
				})),
			};
		case "GroupingSizes":
			return {
				...encode,
				batchGroupCriterion: hook("batch_group_criterion", (item: Keyed) =>
					byteLength(elementOf(item)) < 40 ? { key: "short", batchSize: 5 } : { key: "long", batchSize: 3 },
				),
			};
		default:
			return brokenTask(name, encode, decode);
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
				encodeSample: hook("encode_sample", (): Element => {
					throw new ReferenceError("undefined_name is not defined");
				}),
			};
		case "ThrowsKey":
			return { ...encode, encodeSample: hook("encode_sample", nothingWorks) };
		case "Tolerance3":
			return { ...encode, encodeSample: hook("encode_sample", nothingWorks, { tolerance: 3 }) };
		case "Tolerance3Seeds":
			// Energon forgets a tolerance that is given together with restored seeds.
			return { ...encode, encodeSample: hook("encode_sample", nothingWorks, { restoreSeeds: true }) };
		case "PreAndEncode":
			return { ...encode, preencodeSample: hook("preencode_sample", encoded) };
		case "StatefulEncode":
			return { ...encode, encodeSample: hook("encode_sample", encoded, { stateless: false }) };
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
