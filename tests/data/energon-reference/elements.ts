/** The task encoders of the reference data: their results, and the pieces these are made of. */

import { hook } from "../../../src/data/energon/hook.ts";
import type { Keyed, RestoreKey, Sample, SourceInfo } from "../../../src/data/energon/sample.ts";
import type { Cooker, TaskEncoder } from "../../../src/data/energon/task-encoder.ts";
import { UserError } from "../../../src/system/errors.ts";

/** An encoded sample, a pack or a batch of the reference data. */
export interface Element extends Keyed {
	restoreKey: RestoreKey;
	readonly kind: "sample" | "pack" | "batch";
	readonly keys: readonly string[];
	readonly sources: readonly SourceInfo[];
	readonly texts: readonly string[];
	/** Fields that the encoder adds: name of the cooker, number of a copy, draws, lengths. */
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
	const text = json.conversations?.[0]?.value ?? json.text;
	if (text === undefined) throw new Error("the sample has no text");
	return text;
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

/** Length of the (first) text in UTF-8. */
export const byteLength = (element: Element) => Buffer.byteLength(element.texts[0]!);

/** A cooker that keeps the text of a crude sample, and its own name. */
export function cooker(
	name: string | null,
	hasSubflavors: Readonly<Record<string, unknown>> = {},
	stateless = true,
): Cooker {
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

/** Several elements as one. */
export function collect(kind: "batch" | "pack") {
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

/** Any sample as an element. */
export const encoded = (sample: Sample): Element => elementOf(sample);

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

/** Selecting and packing by one of the two packers. */
export function packing({ capacity, packer }: { capacity?: number; packer?: string }): Partial<TaskEncoder> {
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
