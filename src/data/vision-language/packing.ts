/** Chooses the samples that share a sequence. */
import type { Division } from "../energon/wrappers/packing.ts";

/**
 * greedy: all packs that the greedy knapsack makes of a buffer, the badly filled last ones too. carry-over: the fuller half of them.
 * equal-work: of packs with about the same work for the encoder, the half that is fullest and closest to it. The samples of packs that
 * are not made are the first of the next buffer.
 */
export type PackingMethod = "carry-over" | "equal-work" | "greedy";

/** Of a sample. */
export interface Size {
	readonly tokens: number;
	/** Of its pictures. */
	readonly patches: number;
	/** Of training the encoder on its pictures, as a part of the language model's on a full sequence. */
	readonly work: number;
}

/** Most of a pack. */
export type Bounds = Pick<Size, "tokens" | "patches">;

type Sized<Item> = Size & { readonly item: Item };

interface Pack<Item> {
	readonly samples: Sized<Item>[];
	/** How little of the sequence is padding and how close the work is to its share; 0 is best. */
	readonly fault: number;
}

/**
 * Weight of a pack's empty tokens beside the distance of its work from its share, both as parts of a full pack's. On photographs, 0 leaves
 * half as much padding again, and 0.3 makes steps vary by a tenth more.
 */
const worthOfTokens = 0.1;

/**
 * A buffer divided into packs within the bounds. Samples beyond them have no pack. The same buffer gives the same packs; samples without
 * pictures are packed by length alone.
 */
export function choosePacks<Item>(
	items: readonly Item[],
	sizeOf: (item: Item) => Size,
	most: Bounds,
	method: PackingMethod,
): Division<Item> {
	const fitting = items
		.map((item): Sized<Item> => ({ item, ...sizeOf(item) }))
		.filter(({ tokens, patches }) => tokens <= most.tokens && patches <= most.patches);
	const itemsOf = (packs: readonly Pack<Item>[]) => packs.map(({ samples }) => samples.map(({ item }) => item));
	if (method === "greedy") return { groups: itemsOf(packsOf([], fitting, most, 0)), carried: [] };
	if (fitting.length === 0) return { groups: [], carried: [] };
	const sum = (value: (sample: Size) => number) => fitting.reduce((total, sample) => total + value(sample), 0);
	const share = method === "equal-work" ? sum(({ work }) => work) / sum(({ tokens }) => tokens) : 0;
	const packs = betterHalf(fitting, most, share);
	const gone = new Set(packs.flatMap(({ samples }) => samples));
	return { groups: itemsOf(packs), carried: fitting.filter((one) => !gone.has(one)).map(({ item }) => item) };
}

/** The half of the packs with the least fault. The first sample, which has waited longest, begins a pack that is always made. */
function betterHalf<Item>(fitting: readonly Sized<Item>[], most: Bounds, share: number): Pack<Item>[] {
	const packs = packsOf(fitting.slice(0, 1), fitting.slice(1), most, share);
	const best = packs.toSorted((a, b) => a.fault - b.fault).slice(0, Math.ceil(packs.length / 2));
	const made = new Set([packs[0]!, ...best]);
	return packs.filter((pack) => made.has(pack));
}

/**
 * Packs of all samples, the first begun with `first` and the others with the longest sample left. `share`: the work for each token.
 * Without it they are those of the greedy knapsack of Megatron-LM's multimodal examples.
 */
function packsOf<Item>(
	first: readonly Sized<Item>[],
	others: readonly Sized<Item>[],
	most: Bounds,
	share: number,
): Pack<Item>[] {
	const left = others.toSorted((a, b) => a.tokens - b.tokens);
	const packs: Pack<Item>[] = first.length > 0 ? [fill([...first], left, most, share)] : [];
	while (left.length > 0) packs.push(fill([left.pop()!], left, most, share));
	return packs;
}

/**
 * Moves samples of `left`, which is sorted by length, into the pack until no other fits: each time the sample that leaves to the empty
 * tokens about the work of so many; among equally good samples the longest.
 */
function fill<Item>(samples: Sized<Item>[], left: Sized<Item>[], most: Bounds, share: number): Pack<Item> {
	const sum = (value: (sample: Size) => number) => samples.reduce((total, sample) => total + value(sample), 0);
	let room = most.tokens - sum(({ tokens }) => tokens);
	let patches = most.patches - sum(({ patches }) => patches);
	let work = share * most.tokens - sum((sample) => sample.work);
	const part = (rest: number) => (share > 0 ? Math.abs(rest) / (share * most.tokens) : 0);
	for (let place = best(); place >= 0; place = best()) {
		const [sample] = left.splice(place, 1) as [Sized<Item>];
		samples.push(sample);
		room -= sample.tokens;
		patches -= sample.patches;
		work -= sample.work;
	}
	return { samples, fault: room / most.tokens + part(work) };

	/** Place of the sample that the pack gets next; −1 if no sample fits. */
	function best(): number {
		let [found, least] = [-1, Number.POSITIVE_INFINITY];
		for (let place = lastOfAtMost(room); place >= 0; place--) {
			const sample = left[place]!;
			const empty = room - sample.tokens;
			const unfilled = (worthOfTokens * empty) / most.tokens;
			if (unfilled >= least) break;
			const fault = unfilled + part(work - sample.work - share * empty);
			if (sample.patches <= patches && fault < least) [found, least] = [place, fault];
		}
		return found;
	}

	/** Place of the last that is at most `length` long; −1 if there is none. */
	function lastOfAtMost(length: number): number {
		let [low, high] = [0, left.length];
		while (low < high) {
			const middle = (low + high) >> 1;
			if (left[middle]!.tokens <= length) low = middle + 1;
			else high = middle;
		}
		return low - 1;
	}
}
